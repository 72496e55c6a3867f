// A request as code that somebody may take elsewhere.
import type { Body, Json } from "./request";

// Not of OpenAI's own: its package takes them as extra_body.
const EXTRA = new Set(["top_k", "min_p", "repetition_penalty"]);

/** For a shell. api: the URL up to /v1. keyed: the server wants a key, which is a variable here. */
export function asCurl(body: Body, keyed: boolean, api: string): string {
  return [
    `curl ${api}/chat/completions \\`,
    "  -H 'Content-Type: application/json' \\",
    ...(keyed ? ['  -H "Authorization: Bearer $QUIRE_API_KEY" \\'] : []),
    "  -d @- <<'JSON'", // by standard input: a picture is longer than an argument may be
    JSON.stringify(body, null, 2),
    "JSON",
    "",
  ].join("\n");
}

/** For OpenAI's package. */
export function asPython(body: Body, keyed: boolean, api: string): string {
  const own = Object.entries(body).filter(([name]) => !EXTRA.has(name));
  const extra = Object.entries(body).filter(([name]) => EXTRA.has(name));
  const lines = own.map(([name, value]) => `    ${name}=${literal(value, 1)},`);
  if (extra.length) lines.push(`    extra_body=${literal(Object.fromEntries(extra), 1)},`);
  const key = keyed ? 'os.environ["QUIRE_API_KEY"]' : '"none"';
  return [
    ...(keyed ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(api, 0)}, api_key=${key})`,
    "answer = client.chat.completions.create(",
    ...lines,
    ")",
    "print(answer.choices[0].message.content)",
    "",
  ].join("\n");
}

/** A value as Python writes it. */
function literal(value: Json, depth: number): string {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const [open, close] = Array.isArray(value) ? ["[", "]"] : ["{", "}"];
  const parts = Array.isArray(value)
    ? value.map((one) => literal(one, depth + 1))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, depth + 1)}`);
  const flat = parts.join(", ");
  if (flat.length < 80 && !flat.includes("\n")) return open + flat + close;
  const indent = "    ".repeat(depth + 1);
  return `${open}\n${parts.map((part) => `${indent}${part},`).join("\n")}\n${"    ".repeat(depth)}${close}`;
}
