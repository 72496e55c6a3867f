// npm's `ai`: with @ai-sdk/openai-compatible, and its packages for OpenAI's and Anthropic's own APIs.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { Count, Draw, Scene, check, checkScene, checkStar, told } from "./asked.mjs";

const settings = { name: "quire", baseURL: told.url, apiKey: "none", includeUsage: true };
const quire = createOpenAICompatible(settings);
const openai = createOpenAI({ baseURL: told.url, apiKey: "none" });
const anthropic = createAnthropic({ baseURL: told.url, apiKey: "none" });
// With supportsStructuredOutputs it sends schemas as json_schema, and else asks for any JSON.
const shaped = createOpenAICompatible({ ...settings, supportsStructuredOutputs: true });
const every = [shaped(told.model), openai.chat(told.model), openai.responses(told.model), anthropic(told.model)];
const common = { temperature: 0, maxRetries: 0, maxOutputTokens: 300 };
const tools = {
  draw: tool({ description: "Draw a shape.", inputSchema: Draw, execute: async () => "done" }),
  count: tool({ description: "Count the shapes of a kind.", inputSchema: Count, execute: async () => 1 }),
};
const seen = {
  role: "user",
  content: [{ type: "image", image: told.picture }, { type: "text", text: told.look }],
};

const checks = {
  async text() {
    const answer = await generateText({ ...common, model: quire(told.model), prompt: told.question });
    assert.equal(answer.text, "Red.");
    assert.ok(answer.usage.outputTokens > 0);
  },
  async streams() {
    const answer = streamText({ ...common, model: quire(told.model), prompt: told.question });
    let text = "";
    for await (const piece of answer.textStream) text += piece;
    assert.equal(text, "Red.");
    assert.ok((await answer.usage).outputTokens > 0);
  },
  async images() {
    const answer = await generateText({ ...common, model: quire(told.model), messages: [seen] });
    assert.match(answer.text, /red circle/);
  },
  async adapters() {
    const answer = await generateText({ ...common, model: quire(told.loud), messages: [seen] });
    assert.match(answer.text, /RED CIRCLE/);
  },
  async completions() {
    const model = quire.completionModel(told.model);
    assert.ok((await generateText({ ...common, model, prompt: "Once upon a time", maxOutputTokens: 9 })).text);
  },
  async "text by each API"() {
    for (const model of every) {
      assert.equal((await generateText({ ...common, model, prompt: told.question })).text, "Red.");
      let text = "";
      for await (const piece of streamText({ ...common, model, prompt: told.question }).textStream) text += piece;
      assert.equal(text, "Red.");
    }
  },
  async generateObject() {
    for (const model of every)
      checkScene((await generateObject({ ...common, model, prompt: told.scene, schema: Scene })).object);
    const chosen = ["Red.", "Blue."];
    const answer = await generateObject({ ...common, model: every[0], output: "enum", enum: chosen, prompt: told.question });
    assert.ok(chosen.includes(answer.object));
  },
  async streamObject() {
    for (const model of every) {
      const answer = streamObject({ ...common, model, prompt: told.scene, schema: Scene });
      let last;
      for await (const part of answer.partialObjectStream) last = part;
      checkScene(last);
      checkScene(await answer.object);
    }
  },
  async "any JSON"() {
    const answer = await generateObject({ ...common, model: quire(told.model), prompt: told.scene, output: "no-schema" });
    assert.equal(typeof answer.object, "object");
  },
  async "output objects"() {
    for (const model of every) {
      const output = Output.object({ schema: Scene });
      checkScene((await generateText({ ...common, model, prompt: told.scene, output })).output);
      checkScene(await streamText({ ...common, model, prompt: told.scene, output }).output);
    }
  },
  async tools() {
    for (const model of every)
      for (const toolChoice of ["auto", "required", { type: "tool", toolName: "draw" }]) {
        const { toolCalls, toolResults } = await generateText({ ...common, model, prompt: told.draw, tools, toolChoice });
        assert.deepEqual(toolCalls.map((call) => call.toolName), ["draw"]);
        checkStar(toolCalls[0].input);
        assert.equal(toolResults[0].output, "done");
      }
  },
  async "tools in steps"() {
    for (const model of every) {
      const answer = await generateText({ ...common, model, prompt: told.draw, tools, stopWhen: stepCountIs(4) });
      assert.equal(answer.steps.length, 2);
      checkStar(answer.steps[0].toolCalls[0].input);
      assert.ok(answer.text);
    }
  },
  async "streamed tools in steps"() {
    for (const model of every) {
      const answer = streamText({ ...common, model, prompt: told.draw, tools, stopWhen: stepCountIs(4) });
      const inputs = [];
      let pieces = "";
      for await (const part of answer.fullStream) {
        if (part.type === "error") throw part.error;
        if (part.type === "tool-input-delta") pieces += part.delta;
        if (part.type === "tool-call") inputs.push(part.input);
      }
      assert.equal(inputs.length, 1);
      checkStar(inputs[0]);
      checkStar(JSON.parse(pieces));
      assert.ok(await answer.text);
    }
  },
};

await check(checks);
