// npm's `openai`.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { Draw, Scene, check, checkScene, checkStar, told } from "./asked.mjs";

const client = new OpenAI({ baseURL: told.url, apiKey: "none", maxRetries: 0 });
const asked = { model: told.model, temperature: 0, messages: [{ role: "user", content: told.question }] };
const picture = {
  role: "user",
  content: [{ type: "image_url", image_url: { url: told.picture } }, { type: "text", text: told.look }],
};
const tool = zodFunction({ name: "draw", parameters: Draw });

const ask = async (more) => (await client.chat.completions.create({ ...asked, ...more })).choices[0];

const drawing = { messages: [{ role: "user", content: told.draw }] };
const shapes = { messages: [{ role: "user", content: told.scene }] };
const runnable = (calls) => zodFunction({
  name: "draw",
  description: "Draw a shape.",
  parameters: Draw,
  function: (args) => (calls.push(args), "done"),
});

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
  async tools() {
    const tools = [zodFunction({ name: "draw", parameters: Draw })];
    for (const tool_choice of ["auto", "required", { type: "function", function: { name: "draw" } }]) {
      const { message } = await ask({ ...drawing, tools, tool_choice });
      checkStar(JSON.parse(message.tool_calls[0].function.arguments));
      const parsed = await client.chat.completions.parse({ ...asked, ...drawing, tools, tool_choice });
      checkStar(parsed.choices[0].message.tool_calls[0].function.parsed_arguments);
    }
  },
  async "streamed tools"() {
    const tools = [zodFunction({ name: "draw", parameters: Draw })];
    const stream = client.chat.completions.stream({ ...asked, ...drawing, tools, tool_choice: "required" });
    let pieces = "";
    stream.on("tool_calls.function.arguments.delta", (event) => (pieces += event.arguments_delta));
    const final = await stream.finalChatCompletion();
    const call = final.choices[0].message.tool_calls[0];
    assert.equal(pieces, call.function.arguments);
    assert.equal(call.function.name, "draw");
    checkStar(call.function.parsed_arguments);
  },
  async runTools() {
    for (const stream of [false, true]) {
      const calls = [];
      const runner = client.chat.completions.runTools({ ...asked, ...drawing, tools: [runnable(calls)], stream });
      assert.ok(await runner.finalContent());
      assert.equal(calls.length, 1);
      checkStar(calls[0]);
      assert.equal(await runner.finalFunctionToolCallResult(), "done");
    }
  },
  async parse() {
    const response_format = zodResponseFormat(Scene, "scene");
    const parsed = await client.chat.completions.parse({ ...asked, ...shapes, response_format });
    checkScene(parsed.choices[0].message.parsed);
    const stream = client.chat.completions.stream({ ...asked, ...shapes, response_format });
    checkScene((await stream.finalChatCompletion()).choices[0].message.parsed);
  },
  async "json object"() {
    const { message } = await ask({ ...shapes, response_format: { type: "json_object" } });
    assert.equal(typeof JSON.parse(message.content), "object");
  },
  async responses() {
    const common = { model: told.model, temperature: 0 };
    assert.equal((await client.responses.create({ ...common, input: told.question })).output_text, "Red.");
    let text = "";
    for await (const event of await client.responses.create({ ...common, input: told.question, stream: true }))
      if (event.type === "response.output_text.delta") text += event.delta;
    assert.equal(text, "Red.");
    const format = zodTextFormat(Scene, "scene");
    checkScene((await client.responses.parse({ ...common, input: told.scene, text: { format } })).output_parsed);
    const tools = [zodResponsesFunction({ name: "draw", parameters: Draw })];
    const called = await client.responses.parse({ ...common, input: told.draw, tools, tool_choice: "required" });
    checkStar(called.output[0].parsed_arguments);
    const stream = client.responses.stream({ ...common, input: told.draw, tools, tool_choice: "required" });
    checkStar((await stream.finalResponse()).output[0].parsed_arguments);
  },
};

await check(checks);
