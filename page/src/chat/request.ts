// Requests, as the API has them.
import { baseName } from "../server";
import { type Answer, type Column, type Conversation, nameOf, type Options, type Turn } from "./types";

export type Json = string | number | boolean | null | Json[] | { [name: string]: Json };
export type Body = { [name: string]: Json };

const ALTERNATIVES = 5;
const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty",
  "repetition_penalty",
] as const;

/** The body that asks a column for its answer to a turn. Raises SyntaxError for a schema or tools that are no JSON. */
export function bodyOf(conversation: Conversation, column: Column, turnId: string): Body {
  return {
    model: nameOf(column, baseName.value),
    messages: messagesOf(conversation, column, turnId),
    ...fieldsOf(conversation.options),
  };
}

function messagesOf(conversation: Conversation, column: Column, turnId: string): Json[] {
  const messages: Json[] = [];
  if (conversation.options.system.trim()) messages.push({ role: "system", content: conversation.options.system });
  for (const [place, turn] of conversation.turns.entries()) {
    const asked = askedOf(turn, column);
    if (turn.id === turnId) return [...messages, ...asked];
    const answer = answerFor(conversation, column, turn);
    // What got no answer is left out: templates want users and assistants to take turns.
    if (answer) messages.push(...asked, saidOf(answer, conversation.turns[place + 1], column));
  }
  return messages;
}

/** A column that came later goes on from what the first one answered. */
function answerFor(conversation: Conversation, column: Column, turn: Turn): Answer | undefined {
  const first = conversation.columns[0];
  const found = turn.answers[column.id] ?? (first && turn.answers[first.id]);
  return found && (found.text || found.calls.length > 0) ? found : undefined;
}

function askedOf(turn: Turn, column: Column): Json[] {
  const results = turn.results[column.id];
  if (results) return Object.entries(results).map(([id, content]) => ({ role: "tool", tool_call_id: id, content }));
  if (turn.pictures.length === 0) return [{ role: "user", content: turn.text }];
  const pictures = turn.pictures.map((picture) => ({ type: "image_url", image_url: { url: picture.url } }));
  return [{ role: "user", content: turn.text ? [...pictures, { type: "text", text: turn.text }] : pictures }];
}

/** Calls are told where their results follow. */
function saidOf(answer: Answer, next: Turn | undefined, column: Column): Json {
  if (answer.calls.length === 0 || !next?.results[column.id]) return { role: "assistant", content: answer.text };
  const calls = answer.calls.map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
  return { role: "assistant", content: answer.text || null, tool_calls: calls };
}

function fieldsOf(options: Options): Body {
  const fields: Body = {};
  for (const name of NUMBERS) {
    const value = options[name];
    if (value !== null) fields[name] = value;
  }
  const stop = options.stop.split("\n").filter(Boolean);
  if (stop.length) fields["stop"] = stop;
  if (options.schema.trim()) {
    const schema = parse(options.schema, "The JSON schema");
    fields["response_format"] = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  }
  if (options.tools.trim()) {
    fields["tools"] = parse(options.tools, "The list of tools");
    fields["tool_choice"] = options.toolChoice;
  }
  if (options.logprobs) Object.assign(fields, { logprobs: true, top_logprobs: ALTERNATIVES });
  return fields;
}

/** Raises SyntaxError with a name for what it is. */
export function parse(text: string, what: string): Json {
  try {
    return JSON.parse(text) as Json;
  } catch (error) {
    throw new SyntaxError(`${what} is no JSON: ${(error as Error).message}`);
  }
}
