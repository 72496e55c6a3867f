// npm's `@anthropic-ai/sdk`.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import * as z from "zod";
import { Draw, Scene, check, checkScene, checkStar, told } from "./asked.mjs";

const client = new Anthropic({ baseURL: told.server, apiKey: "none", maxRetries: 0 });
const common = { model: told.model, max_tokens: 300, temperature: 0 };
const asked = (content) => ({ ...common, messages: [{ role: "user", content }] });
const tools = [{ name: "draw", description: "Draw a shape.", input_schema: z.toJSONSchema(Draw) }];
const runnable = (calls) => betaZodTool({
  name: "draw",
  description: "Draw a shape.",
  inputSchema: Draw,
  run: (args) => (calls.push(args), "done"),
});

const checks = {
  async text() {
    const answer = await client.messages.create(asked(told.question));
    assert.equal(answer.content[0].text, "Red.");
    assert.ok(answer.usage.output_tokens > 0);
  },
  async streams() {
    const stream = client.messages.stream(asked(told.question));
    let text = "";
    stream.on("text", (piece) => (text += piece));
    assert.equal(await stream.finalText(), "Red.");
    assert.equal(text, "Red.");
  },
  async tools() {
    for (const tool_choice of [{ type: "auto" }, { type: "any" }, { type: "tool", name: "draw" }]) {
      const told_ = { ...asked(told.draw), tools, tool_choice };
      const whole = await client.messages.create(told_);
      const streamed = await client.messages.stream(told_).finalMessage();
      for (const answer of [whole, streamed]) {
        assert.equal(answer.stop_reason, "tool_use");
        checkStar(answer.content.find((block) => block.type === "tool_use").input);
      }
    }
  },
  async toolRunner() {
    for (const stream of [false, true]) {
      const calls = [];
      const runner = client.beta.messages.toolRunner({ ...asked(told.draw), tools: [runnable(calls)], stream });
      assert.equal((await runner.runUntilDone()).stop_reason, "end_turn");
      assert.equal(calls.length, 1);
      checkStar(calls[0]);
    }
  },
  async parse() {
    const output_config = { format: zodOutputFormat(Scene) };
    checkScene((await client.messages.parse({ ...asked(told.scene), output_config })).parsed_output);
    checkScene((await client.messages.stream({ ...asked(told.scene), output_config }).finalMessage()).parsed_output);
  },
  async "count of tokens"() {
    const { model, messages } = asked(told.question);
    const counted = await client.messages.countTokens({ model, messages });
    const { usage } = await client.messages.create(asked(told.question));
    assert.equal(counted.input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
  },
};

await check(checks);
