// A request as code is the request: a shell and Python say what they would send.
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

import { asCurl, asPython } from "../src/chat/code";
import type { Body } from "../src/chat/request";

const API = "http://localhost:8000/v1";
const BODY: Body = {
  model: "it's \"mine\"",
  messages: [
    { role: "system", content: "JSON\n$HOME `id` \\ 'quoted' \"doubly\"\nJSON" },
    { role: "user", content: [{ type: "image_url", image_url: { url: `data:image/png;base64,${"A".repeat(300_000)}` } }, { type: "text", text: "é 😀 \u2028" }] },
    { role: "assistant", content: null },
  ],
  temperature: 0.5,
  top_k: 3,
  logprobs: true,
  tools: [],
};
const LONG = 4 << 20; // bytes of an answer

function run(command: string, args: string[], input: string, env: NodeJS.ProcessEnv = {}): string {
  const done = spawnSync(command, args, { input, encoding: "utf8", maxBuffer: LONG, env: { ...process.env, QUIRE_API_KEY: "a key", ...env } });
  assert.equal(done.status, 0, done.stderr);
  return done.stdout;
}

test("curl is given the body, whatever stands in it, and the key as a variable", () => {
  const curl = 'curl() { printf "%s\\n" "$@" >&2; cat; }\n';
  assert.deepEqual(JSON.parse(run("sh", ["-s"], curl + asCurl(BODY, true, API))), BODY);
  const told = 'curl() { cat >/dev/null; printf "%s|" "$@"; }\n';
  const header = "-H|Content-Type: application/json|";
  assert.equal(run("sh", ["-s"], told + asCurl(BODY, false, API)), `${API}/chat/completions|${header}-d|@-|`);
  assert.match(run("sh", ["-s"], told + asCurl(BODY, true, API)), /-H\|Authorization: Bearer a key\|/);
});

test("Python's client is given the body, and what OpenAI's package does not know as extra_body", () => {
  const folder = mkdtempSync(join(tmpdir(), "quire-code-"));
  try {
    const client = [
      "import json, types",
      "class OpenAI:",
      "    def __init__(self, **options):",
      "        self.options = options",
      "        self.chat = types.SimpleNamespace(completions=self)",
      "    def create(self, **body):",
      "        text = json.dumps([self.options, body])",
      "        return types.SimpleNamespace(choices=[types.SimpleNamespace(message=types.SimpleNamespace(content=text))])",
    ];
    writeFileSync(join(folder, "openai.py"), client.join("\n"));
    const { top_k, ...own } = BODY;
    for (const [keyed, key] of [[true, "a key"], [false, "none"]] as const) {
      const said = run("python3", ["-"], asPython(BODY, keyed, API), { PYTHONPATH: folder });
      assert.deepEqual(JSON.parse(said), [{ base_url: API, api_key: key }, { ...own, extra_body: { top_k: top_k! } }]);
    }
  } finally {
    rmSync(folder, { recursive: true });
  }
});
