// What a conversation is, in memory, in the browser's database and in an export.

export interface Picture {
  name: string;
  url: string; // data:image/...
}

export interface Alternative {
  token: string;
  logprob: number;
}

/** A token of an answer, with the likeliest in its place. shown: the characters that it ends, which are its text but for
 * tokens that are parts of a character. */
export interface Token extends Alternative {
  shown: string;
  top: Alternative[];
}

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

export interface Usage {
  prompt: number;
  cached: number;
  output: number;
}

/** options: those that it was asked with. finish: why it ended, as the API says it, or "stopped"; null while it runs.
 * Times are milliseconds. */
export interface Answer {
  model: string;
  options: Options;
  text: string;
  reasoning: string;
  calls: ToolCall[];
  tokens: Token[];
  finish: string | null;
  error: string | null;
  first: number | null;
  total: number | null;
  usage: Usage | null;
}

/** What was asked, and what each column answered. results: of tools, by column and call, instead of a text. */
export interface Turn {
  id: string;
  text: string;
  pictures: Picture[];
  results: Record<string, Record<string, string>>;
  answers: Record<string, Answer>;
}

export interface Share {
  name: string;
  weight: number;
}

/** Who answers: a model by its name ("": the base model), or a mixture of adapters. */
export interface Column {
  id: string;
  model: string;
  mixture: Share[] | null;
}

/** Numbers that are null are the server's to choose. */
export interface Options {
  system: string;
  temperature: number | null;
  top_p: number | null;
  top_k: number | null;
  min_p: number | null;
  max_tokens: number | null;
  seed: number | null;
  presence_penalty: number | null;
  frequency_penalty: number | null;
  repetition_penalty: number | null;
  stop: string; // one a line
  schema: string; // JSON, or nothing
  tools: string; // JSON, or nothing
  toolChoice: "auto" | "required" | "none";
  logprobs: boolean;
}

export interface Conversation {
  id: string;
  title: string;
  changed: number; // milliseconds since 1970
  columns: Column[];
  options: Options;
  turns: Turn[];
}

export const MOST_COLUMNS = 4;

export const NO_OPTIONS: Options = {
  system: "", temperature: null, top_p: null, top_k: null, min_p: null, max_tokens: null, seed: null,
  presence_penalty: null, frequency_penalty: null, repetition_penalty: null, stop: "", schema: "", tools: "",
  toolChoice: "auto", logprobs: false,
};

/** randomUUID is there on secure origins alone, and a server in one's own network has none. */
export function newId(): string {
  return [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newColumn(model = ""): Column {
  return { id: newId(), model, mixture: null };
}

/** A token's text; of one that is a part of a letter its bytes, by which it is told from others. */
export function tokenName({ token, bytes }: { token: string; bytes?: number[] | null }): string {
  if (!bytes || !token.includes("\ufffd")) return token;
  return `<${bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ")}>`;
}

/** What an adapter or a mixture is called where people read it. */
export function nameOf(column: Column, base: string): string {
  return column.mixture ? mixtureName(column.mixture) : column.model || base;
}

/** The name under which a mixture is loaded: the same shares have the same. */
export function mixtureName(mixture: Share[]): string {
  const shares = mixture.filter((share) => share.weight !== 0).map((share) => `${share.name}-${share.weight}`);
  return `mix:${shares.join(":") || "nothing"}`;
}
