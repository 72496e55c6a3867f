// npm's `openai`. The check's name is the argument; what it needs comes as JSON on standard input.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const told = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI({ baseURL: told.url, apiKey: "none", maxRetries: 0 });
const asked = { model: told.model, temperature: 0, messages: [{ role: "user", content: told.question }] };
const picture = {
  role: "user",
  content: [{ type: "image_url", image_url: { url: told.picture } }, { type: "text", text: told.look }],
};
const tool = { type: "function", function: { name: "look", parameters: { type: "object", properties: {} } } };

const ask = async (more) => (await client.chat.completions.create({ ...asked, ...more })).choices[0];

async function refused(more, param, text) {
  await assert.rejects(client.chat.completions.create({ ...asked, ...more }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, param);
    assert.match(error.message, text);
    return true;
  });
}

const checks = {
  async text() {
    assert.equal((await ask({})).message.content, "Red.");
    const done = await client.completions.create({ model: told.model, prompt: "Once upon a time", max_tokens: 9 });
    assert.ok(done.choices[0].text && done.usage.completion_tokens === 9);
  },
  async streams() {
    let text = "";
    let usage;
    const events = await client.chat.completions.create({
      ...asked, stream: true, stream_options: { include_usage: true },
    });
    for await (const event of events) {
      text += event.choices[0]?.delta?.content ?? "";
      usage = event.usage ?? usage;
    }
    assert.equal(text, "Red.");
    assert.ok(usage.total_tokens > usage.completion_tokens);
    const helper = client.chat.completions.stream(asked);
    assert.equal(await helper.finalContent(), "Red.");
  },
  async images() {
    assert.match((await ask({ messages: [picture] })).message.content, /red circle/);
  },
  async logprobs() {
    const { logprobs } = await ask({ logprobs: true, top_logprobs: 2 });
    assert.equal(logprobs.content[0].top_logprobs.length, 2);
  },
  async "stop and seed"() {
    assert.equal((await ask({ stop: ["."], seed: 3 })).message.content, "Red");
  },
  async adapters() {
    assert.match((await ask({ model: told.loud, messages: [picture] })).message.content, /RED CIRCLE/);
    const names = [];
    for await (const one of client.models.list()) names.push(one.id);
    assert.ok(names.includes(told.model) && names.includes(told.loud));
    await assert.rejects(ask({ model: "absent" }), OpenAI.NotFoundError);
  },
  async "fields that change no answer"() {
    const more = { metadata: { run: "7" }, store: true, user: "me", tools: [tool], tool_choice: "none" };
    assert.equal((await ask(more)).message.content, "Red.");
  },
  async "a context that is too long"() {
    await assert.rejects(ask({ messages: [{ role: "user", content: told.long }] }), (error) => {
      assert.equal(error.code, "context_length_exceeded");
      return true;
    });
  },
  "refused tools": () => refused({ tools: [tool] }, "tools", /tool calls/),
  "refused structured output": () =>
    refused({ response_format: { type: "json_object" } }, "response_format", /structured output/),
};

await checks[process.argv[2]]();
