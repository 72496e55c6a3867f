// What comes from a file or an older version, made a conversation: parts that are none are left out.
import { type Answer, type Conversation, MOST_COLUMNS, NO_OPTIONS, newColumn, newId, type Options, type Turn } from "./types";

type Loose = Record<string, unknown>;

const isObject = (value: unknown): value is Loose => typeof value === "object" && value !== null && !Array.isArray(value);
const text = (value: unknown): string => (typeof value === "string" ? value : "");
const numeric = (value: unknown): number | null => (typeof value === "number" && Number.isFinite(value) ? value : null);
/** An id as newId() makes them: others, "__proto__" among them, could name what every object has. */
const idOf = (value: unknown): string => (/^[0-9a-f]{1,32}$/.test(text(value)) ? text(value) : newId());
const objects = (value: unknown): Loose[] => (Array.isArray(value) ? value.filter(isObject) : []);

/** A conversation, or null where there is nothing of one. */
export function revive(value: unknown): Conversation | null {
  if (!isObject(value) || !Array.isArray(value["turns"])) return null;
  const columns = objects(value["columns"]).slice(0, MOST_COLUMNS).map((column) => ({
    id: idOf(column["id"]),
    model: text(column["model"]),
    mixture: Array.isArray(column["mixture"])
      ? objects(column["mixture"]).map((share) => ({ name: text(share["name"]), weight: numeric(share["weight"]) ?? 0 }))
      : null,
  }));
  return {
    id: idOf(value["id"]),
    title: text(value["title"]) || "Untitled",
    changed: numeric(value["changed"]) ?? Date.now(),
    columns: columns.length ? columns : [newColumn()],
    options: optionsOf(value["options"]),
    turns: objects(value["turns"]).map(turnOf),
  };
}

function optionsOf(value: unknown): Options {
  const options: Options = { ...NO_OPTIONS };
  if (!isObject(value)) return options;
  const given = Object.entries(value).filter(([name, one]) => {
    const initial = (NO_OPTIONS as unknown as Loose)[name];
    return initial === null ? one === null || numeric(one) !== null : initial !== undefined && typeof one === typeof initial;
  });
  Object.assign(options, Object.fromEntries(given));
  if (!["auto", "required", "none"].includes(options.toolChoice)) options.toolChoice = "auto";
  return options;
}

function turnOf(value: Loose): Turn {
  const results = isObject(value["results"]) ? value["results"] : {};
  const answers = isObject(value["answers"]) ? value["answers"] : {};
  return {
    id: idOf(value["id"]),
    text: text(value["text"]),
    pictures: objects(value["pictures"])
      .map((picture) => ({ name: text(picture["name"]), url: text(picture["url"]) }))
      .filter((picture) => picture.url.startsWith("data:image/")),
    results: Object.fromEntries(
      Object.entries(results).filter((entry): entry is [string, Loose] => isObject(entry[1])).map(([column, calls]) => [
        column,
        Object.fromEntries(Object.entries(calls).map(([id, result]) => [id, text(result)])),
      ]),
    ),
    answers: Object.fromEntries(
      Object.entries(answers).filter((entry): entry is [string, Loose] => isObject(entry[1])).map(([column, one]) => [
        column,
        answerOf(one),
      ]),
    ),
  };
}

function answerOf(value: Loose): Answer {
  const usage = value["usage"];
  const alternative = (one: Loose) => ({ token: text(one["token"]), logprob: numeric(one["logprob"]) ?? 0 });
  return {
    model: text(value["model"]),
    options: optionsOf(value["options"]),
    text: text(value["text"]),
    reasoning: text(value["reasoning"]),
    calls: objects(value["calls"]).map((call) => ({
      id: text(call["id"]),
      name: text(call["name"]),
      arguments: text(call["arguments"]),
    })),
    tokens: objects(value["tokens"]).map((token) => ({ ...alternative(token), shown: text(token["shown"]), top: objects(token["top"]).map(alternative) })),
    // What ran when the page was closed has ended with it.
    finish: text(value["finish"]) || "stopped",
    error: typeof value["error"] === "string" ? value["error"] : null,
    first: numeric(value["first"]),
    total: numeric(value["total"]),
    usage: isObject(usage)
      ? { prompt: numeric(usage["prompt"]) ?? 0, cached: numeric(usage["cached"]) ?? 0, output: numeric(usage["output"]) ?? 0 }
      : null,
  };
}
