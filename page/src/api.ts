// Every call of the server goes through here: relative URLs, the key, errors as the API tells them, and whether the
// server is there at all.
import { signal } from "@preact/signals";
import { readEvents, type ServerEvent } from "./sse";

/** What the API answered instead of success. status 0: nobody answered. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly param: string | null = null,
    readonly code: string | null = null,
  ) {
    super(message);
    this.name = "ApiError";
  }
}

const KEY = "quire.key";

/** The API key (or the admin key, which opens all): kept for this tab, or on this device where that was asked for. */
export const key = signal(storedKey());
/** Why a key is asked for: the server's own words; null where it is not. */
export const keyWanted = signal<string | null>(null);
/** Whether the server answers. */
export const online = signal(true);
/** Counts how often the server came back or a key was given: what was loaded before is to be loaded again. */
export const session = signal(0);

function storedKey(): string {
  try {
    return sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // storage is forbidden: the key lives as long as the page
  }
}

export function setKey(value: string, remember: boolean): void {
  key.value = value.trim();
  try {
    sessionStorage.setItem(KEY, key.value);
    if (remember) localStorage.setItem(KEY, key.value);
    else localStorage.removeItem(KEY);
  } catch {
    // As above.
  }
  keyWanted.value = null;
  session.value += 1;
}

export function isAbort(error: unknown): boolean {
  return error instanceof DOMException && error.name === "AbortError";
}

/** What to tell of anything that was thrown. */
export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** A response that is a success. Raises ApiError, or what an abort raises. path: without a slash before it. */
export async function call(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  authorise(headers);
  let response: Response;
  try {
    response = await fetch(path, { ...init, headers, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (isAbort(error)) throw error;
    gone();
    throw new ApiError(0, "The server does not answer.");
  }
  back();
  if (response.ok) return response;
  throw wantsKey(await errorOf(response));
}

/** Raises ApiError where the key has characters that no header can carry, and asks for another. */
function authorise(headers: Headers): void {
  if (!key.value) return;
  try {
    headers.set("Authorization", `Bearer ${key.value}`);
  } catch {
    keyWanted.value = "The key has characters that cannot be sent: keys are of letters, digits and signs of ASCII.";
    throw new ApiError(401, keyWanted.value);
  }
}

async function errorOf(response: Response): Promise<ApiError> {
  return errorFrom(response.status, response.statusText, await response.text().catch(() => ""));
}

function errorFrom(status: number, statusText: string, text: string): ApiError {
  try {
    const { error } = JSON.parse(text) as { error: { message: string; param?: string | null; code?: string | null } };
    return new ApiError(status, error.message, error.param ?? null, error.code ?? null);
  } catch {
    return new ApiError(status, `${status} ${statusText}`.trim());
  }
}

/** Of an answer that is no success; asks for a key where that is what is missing. */
function wantsKey(error: ApiError): ApiError {
  if (error.status === 401 || error.code === "admin_key_needed") keyWanted.value = error.message;
  return error;
}

export async function getJson<T>(path: string, abort?: AbortSignal): Promise<T> {
  return (await (await call(path, { signal: abort ?? null })).json()) as T;
}

export async function postJson<T>(path: string, body: unknown, abort?: AbortSignal): Promise<T> {
  return (await (await call(path, json(body, abort))).json()) as T;
}

/** POST a form whose sending is told (0..1, by its bytes), which fetch cannot. Raises what `call` does. */
export async function postForm<T>(path: string, form: FormData, abort: AbortSignal, sent: (part: number) => void): Promise<T> {
  const headers = new Headers();
  authorise(headers);
  return new Promise<T>((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", path);
    headers.forEach((value, name) => request.setRequestHeader(name, value));
    request.upload.onprogress = ({ loaded, total }) => sent(total > 0 ? loaded / total : 0);
    request.onload = () => {
      back();
      if (request.status >= 200 && request.status < 300) resolve(JSON.parse(request.responseText) as T);
      else reject(wantsKey(errorFrom(request.status, request.statusText, request.responseText)));
    };
    request.onerror = () => {
      gone();
      reject(new ApiError(0, "The connection broke before the server had all of it."));
    };
    request.onabort = () => reject(new DOMException("stopped", "AbortError"));
    abort.addEventListener("abort", () => request.abort(), { once: true });
    request.send(form);
  });
}

export async function remove<T>(path: string): Promise<T> {
  return (await (await call(path, { method: "DELETE" })).json()) as T;
}

/** The events of GET path, or of POST path with a body. A connection that breaks raises ApiError with status 0. */
export async function* events(path: string, abort: AbortSignal, body?: unknown): AsyncGenerator<ServerEvent> {
  const response = await call(path, body === undefined ? { signal: abort } : json(body, abort));
  if (!response.body) return;
  try {
    yield* readEvents(response.body);
  } catch (error) {
    if (isAbort(error)) throw error;
    gone();
    throw new ApiError(0, "The connection broke.");
  }
}

function json(body: unknown, abort?: AbortSignal): RequestInit {
  const headers = { "Content-Type": "application/json" };
  return { method: "POST", headers, body: JSON.stringify(body), signal: abort ?? null };
}

let probe: number | undefined;

/** Ask until the server is there again, more and more rarely. */
function gone(wait = 1000): void {
  online.value = false;
  if (probe !== undefined) return;
  probe = window.setTimeout(async () => {
    probe = undefined;
    try {
      await fetch("health", { cache: "no-store" });
      back();
    } catch {
      gone(Math.min(wait * 1.5, 8000));
    }
  }, wait);
}

/** Ask now. */
export function retryNow(): void {
  window.clearTimeout(probe);
  probe = undefined;
  gone(0);
}

function back(): void {
  if (online.value) return;
  window.clearTimeout(probe);
  probe = undefined;
  online.value = true;
  session.value += 1;
}
