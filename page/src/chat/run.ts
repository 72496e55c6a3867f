// Answers as they come: one stream for each column, all at once, so that the engine computes them in one batch.
import { signal, type Signal } from "@preact/signals";
import { ApiError, events, isAbort, messageOf, postJson } from "../api";
import { baseName, models, refresh } from "../server";
import { change, changeTurn, conversations, putAnswer } from "../store";
import { type Body, bodyOf } from "./request";
import { type Answer, type Column, type Conversation, mixtureName, nameOf, newId, type Options, type Picture, type Token, tokenName, type Turn } from "./types";

const SAVED_EVERY = 2000; // milliseconds, of an answer that goes on

interface Running {
  answer: Signal<Answer>;
  stop: AbortController;
}

/** Answers that are being given, by place(). */
export const running = signal<ReadonlyMap<string, Running>>(new Map());
/** What a screen reader is told. */
export const spoken = signal("");

export const place = (turnId: string, columnId: string): string => `${turnId}/${columnId}`;

/** Whether a conversation is being answered. */
export function isBusy(conversation: Conversation | undefined): boolean {
  return conversation !== undefined && runningOf(conversation).length > 0;
}

export function stop(conversation: Conversation): void {
  for (const one of runningOf(conversation)) one.stop.abort();
}

function runningOf(conversation: Conversation): Running[] {
  const turns = new Set(conversation.turns.map((turn) => turn.id));
  return [...running.value].filter(([where]) => turns.has(where.split("/")[0] ?? "")).map(([, one]) => one);
}

/** Ask all columns. Turns from `instead` on are replaced. */
export function ask(id: string, text: string, pictures: Picture[], instead: string | null): void {
  const turn: Turn = { id: newId(), text, pictures, results: {}, answers: {} };
  change(id, (one) => {
    const from = one.turns.findIndex((old) => old.id === instead);
    const turns = [...(from < 0 ? one.turns : one.turns.slice(0, from)), turn];
    const fresh = turns.length === 1 && (one.turns.length === 0 || instead !== null);
    return { ...one, turns, changed: Date.now(), title: fresh ? titleOf(text) : one.title };
  });
  for (const column of columnsOf(id)) void answer(id, turn.id, column.id);
}

/** Give a column the results of the tools that it called. */
export function giveResults(id: string, columnId: string, results: Record<string, string>): void {
  const turn: Turn = { id: newId(), text: "", pictures: [], results: { [columnId]: results }, answers: {} };
  change(id, (one) => ({ ...one, turns: [...one.turns, turn], changed: Date.now() }));
  void answer(id, turn.id, columnId);
}

const columnsOf = (id: string): Column[] => conversations.value.find((one) => one.id === id)?.columns ?? [];

const titleOf = (text: string): string => text.trim().replace(/\s+/g, " ").slice(0, 60) || "A picture";

/** Let a column answer a turn (again). Never raises: what went wrong stands in the answer. */
export async function answer(id: string, turnId: string, columnId: string): Promise<void> {
  const conversation = conversations.value.find((one) => one.id === id);
  const column = conversation?.columns.find((one) => one.id === columnId);
  const where = place(turnId, columnId);
  if (!conversation || !column || running.value.has(where)) return;
  changeTurn(id, turnId, ({ answers: { [columnId]: _, ...answers }, ...turn }) => ({ ...turn, answers }));
  const stop = new AbortController();
  const stream = new AnswerStream(nameOf(column, baseName.value), conversation.options, (told) => putAnswer(id, turnId, columnId, told));
  running.value = new Map(running.value).set(where, { answer: stream.shown, stop });
  spoken.value = `${stream.shown.value.model} answers`;
  try {
    if (baseName.value === "") {
      await refresh(); // the page was quicker than the server
      stream.name(nameOf(column, baseName.value));
    }
    const body = bodyOf(conversation, column, turnId);
    if (column.mixture) await loadMixture(column);
    await stream.read({ ...body, stream: true, stream_options: { include_usage: true } }, stop.signal);
  } catch (error) {
    stream.end(isAbort(error) ? "stopped" : "error", isAbort(error) ? null : messageOf(error));
    if (error instanceof ApiError && error.status === 404) void refresh();
  }
  const left = new Map(running.value);
  left.delete(where);
  running.value = left;
  const { model, text, error } = stream.shown.value;
  spoken.value = `${model}: ${error ?? text.slice(0, 1000)}`;
}

/** The names of mixtures that this page has loaded. */
const mixed = new Set<string>();

async function loadMixture(column: Column): Promise<void> {
  const name = mixtureName(column.mixture ?? []);
  if (models.value.some((model) => model.id === name)) return;
  const adapters = (column.mixture ?? []).filter((share) => share.weight !== 0);
  if (adapters.length === 0) throw new Error("A mixture needs an adapter whose weight is not 0.");
  await postJson("v1/load_lora_adapter", { lora_name: name, adapters: adapters.map(({ name, weight }) => ({ name, weight })) });
  mixed.add(name);
  forgetMixtures();
  await refresh();
}

/** Sliders make many: those that no column asks for any more go, once their answers have ended. */
function forgetMixtures(): void {
  const columns = conversations.value.flatMap((conversation) => conversation.columns);
  const wanted = new Set(columns.map((column) => mixtureName(column.mixture ?? [])));
  for (const name of mixed) {
    if (wanted.has(name)) continue;
    mixed.delete(name);
    postJson("v1/unload_lora_adapter", { lora_name: name }).catch(() => undefined); // somebody else has unloaded it
  }
}

interface ToldToken {
  token: string;
  logprob: number;
  bytes?: number[] | null;
}

interface Chunk {
  error?: { message: string };
  usage?: { prompt_tokens: number; completion_tokens: number; prompt_tokens_details?: { cached_tokens?: number } } | null;
  choices?: {
    delta?: {
      content?: string | null;
      reasoning?: string | null;
      reasoning_content?: string | null;
      tool_calls?: { index: number; id?: string; function?: { name?: string; arguments?: string } }[];
    };
    logprobs?: { content?: (ToldToken & { top_logprobs?: ToldToken[] })[] | null } | null;
    finish_reason?: string | null;
  }[];
}

/** An answer that grows: shown once a frame, kept every other second. */
class AnswerStream {
  readonly shown: Signal<Answer>;
  private draft: Answer;
  private tokens: Token[] = [];
  private readonly begun = performance.now();
  private saved = performance.now();
  private frame: number | undefined;
  private readonly decoder = new TextDecoder("utf-8", { ignoreBOM: true }); // which of a token's bytes end which letters

  constructor(
    model: string,
    options: Options,
    private readonly keep: (answer: Answer) => void,
  ) {
    this.draft = {
      model, options, text: "", reasoning: "", calls: [], tokens: [], finish: null, error: null, first: null, total: null, usage: null,
    };
    this.shown = signal(this.draft);
  }

  /** Say who answers, where that was not known yet. */
  name(model: string): void {
    this.draft.model = model;
    this.show();
  }

  async read(body: Body, abort: AbortSignal): Promise<void> {
    for await (const { data } of events("v1/chat/completions", abort, body)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data) as Chunk;
      if (chunk.error) throw new Error(chunk.error.message);
      this.take(chunk);
    }
    if (this.draft.finish === null) throw new Error("The stream ended before the answer did.");
    this.end(this.draft.finish, null);
  }

  private take({ choices, usage }: Chunk): void {
    const draft = this.draft;
    if (usage) {
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      draft.usage = { prompt: usage.prompt_tokens, cached, output: usage.completion_tokens };
    }
    const choice = choices?.[0];
    if (!choice) return;
    draft.first ??= performance.now() - this.begun;
    draft.text += choice.delta?.content ?? "";
    draft.reasoning += choice.delta?.reasoning_content ?? choice.delta?.reasoning ?? "";
    for (const part of choice.delta?.tool_calls ?? []) {
      const call = (draft.calls[part.index] ??= { id: part.id ?? newId(), name: "", arguments: "" });
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
    for (const told of choice.logprobs?.content ?? []) {
      const top = (told.top_logprobs ?? []).map((one) => ({ token: tokenName(one), logprob: one.logprob }));
      const shown = told.bytes ? this.decoder.decode(new Uint8Array(told.bytes), { stream: true }) : told.token;
      this.tokens.push({ token: tokenName(told), shown, logprob: told.logprob, top });
    }
    draft.finish = choice.finish_reason ?? draft.finish;
    this.frame ??= requestAnimationFrame(() => this.show());
  }

  private show(): void {
    this.frame = undefined;
    // While it runs it has no end, so that nobody takes it for whole.
    this.shown.value = { ...this.draft, calls: this.draft.calls.map((call) => ({ ...call })), tokens: [...this.tokens], finish: null };
    if (performance.now() - this.saved > SAVED_EVERY) {
      this.saved = performance.now();
      this.keep({ ...this.shown.value, tokens: [] });
    }
  }

  end(finish: string, error: string | null): void {
    if (this.frame !== undefined) cancelAnimationFrame(this.frame);
    const last = this.tokens.pop();
    if (last) this.tokens.push({ ...last, shown: last.shown + this.decoder.decode() }); // a letter that stayed a part of one
    const total = performance.now() - this.begun;
    this.shown.value = { ...this.draft, tokens: [...this.tokens], finish, error, total };
    this.keep(this.shown.value);
  }
}
