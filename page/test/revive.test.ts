// What comes from a file becomes a conversation or nothing, whatever stands in it.
import assert from "node:assert/strict";
import { test } from "node:test";

import { revive } from "../src/chat/revive";

const answer = { model: "m", text: "t", finish: "stop", tokens: [{ token: "t", shown: "t", logprob: -1, top: [] }] };
const turn = { id: "t", text: "q", pictures: [], results: {}, answers: { c: answer } };
const whole = { id: "a", title: "b", changed: 5, columns: [{ id: "c", model: "x", mixture: null }], options: {}, turns: [turn] };

test("what is whole comes back", () => {
  const once = revive(whole);
  assert.equal(once?.turns[0]?.answers["c"]?.text, "t");
  assert.equal(once?.turns[0]?.answers["c"]?.tokens[0]?.logprob, -1);
  assert.deepEqual(revive(JSON.parse(JSON.stringify(once))), once);
});

test("what is none is left out", () => {
  for (const value of [null, 5, "x", [], {}, { turns: 5 }]) assert.equal(revive(value), null);
});

test("parts that are wrong are made right or left out", () => {
  const odd = { ...whole, title: 5, changed: "x", columns: "no", options: { temperature: "hot", stop: 5, toolChoice: "maybe", top_k: 3, no: 1 } };
  const made = revive({ ...odd, turns: [null, { ...turn, pictures: [{ url: "https://evil.example/x.png" }, { url: "data:image/png;base64,AA" }], answers: { c: 5 } }] });
  assert(made);
  assert.equal(made.title, "Untitled");
  assert.equal(made.columns.length, 1);
  assert.deepEqual([made.options.temperature, made.options.stop, made.options.toolChoice, made.options.top_k], [null, "", "auto", 3]);
  assert.equal("no" in made.options, false);
  assert.deepEqual(made.turns.map((one) => one.pictures.length), [1]);
  assert.deepEqual(made.turns[0]?.answers, {});
});

test("an answer that ran when the page was closed has ended", () => {
  const made = revive({ ...whole, turns: [{ ...turn, answers: { c: { ...answer, finish: null } } }] });
  assert.equal(made?.turns[0]?.answers["c"]?.finish, "stopped");
});
