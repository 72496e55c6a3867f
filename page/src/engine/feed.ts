// The engine's events while somebody looks: begun anew when the server is back, stopped while the page is hidden.
import { signal } from "@preact/signals";
import { useEffect, useState } from "preact/hooks";
import { ApiError, events, isAbort, messageOf, online, session } from "../api";
import { remember, type EngineState, type History } from "./state";

const PATH = "v1/engine/events?rate=4";
const AGAIN = 4000; // milliseconds until a refused watcher asks once more

export type Link = { kind: "connecting" } | { kind: "live" } | { kind: "gone" } | { kind: "refused"; why: string };

export const seen = signal<History | null>(null);
export const link = signal<Link>({ kind: "connecting" });

async function watch(abort: AbortSignal): Promise<void> {
  link.value = { kind: "connecting" };
  for await (const { event, data } of events(PATH, abort)) {
    if (event === "error") throw new ApiError(500, (JSON.parse(data) as { error: { message: string } }).error.message);
    if (event !== "state") continue;
    seen.value = remember(seen.peek(), JSON.parse(data) as EngineState, Date.now() / 1000);
    link.value = { kind: "live" };
  }
  throw new ApiError(0, "The server ended the stream.");
}

/** Watch while a component is there and the page is visible. */
export function useEngineFeed(): void {
  const visible = useVisible();
  const [attempt, setAttempt] = useState(0);
  useEffect(() => {
    if (!visible) return;
    const abort = new AbortController();
    let timer: number | undefined;
    watch(abort.signal).catch((error: unknown) => {
      if (isAbort(error) || abort.signal.aborted) return;
      const lost = error instanceof ApiError && error.status === 0;
      link.value = lost ? { kind: "gone" } : { kind: "refused", why: messageOf(error) };
      // A key that was asked for, and a server that is back, are told by `session`; all else is asked for again.
      const waits = !online.value || (error instanceof ApiError && (error.status === 401 || error.status === 404));
      if (!waits) timer = window.setTimeout(() => setAttempt((last) => last + 1), AGAIN);
    });
    return () => {
      window.clearTimeout(timer);
      abort.abort();
    };
  }, [visible, attempt, session.value]);
}

function useVisible(): boolean {
  const [visible, setVisible] = useState(!document.hidden);
  useEffect(() => {
    const look = () => setVisible(!document.hidden);
    document.addEventListener("visibilitychange", look);
    return () => document.removeEventListener("visibilitychange", look);
  }, []);
  return visible;
}
