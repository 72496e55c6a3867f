// npm's `ai`, with @ai-sdk/openai-compatible. The check's name is the argument; what it needs comes on standard input.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, streamText, tool } from "ai";

const told = JSON.parse(readFileSync(0, "utf8"));
const settings = { name: "quire", baseURL: told.url, apiKey: "none", includeUsage: true };
const quire = createOpenAICompatible(settings);
const common = { temperature: 0, maxRetries: 0 };
const schema = jsonSchema({ type: "object", properties: { color: { type: "string" } }, required: ["color"] });
const seen = {
  role: "user",
  content: [{ type: "image", image: told.picture }, { type: "text", text: told.look }],
};

async function refused(promise, text) {
  await assert.rejects(promise, (error) => {
    assert.equal(error.statusCode, 400);
    assert.match(error.message, text);
    return true;
  });
}

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
  "refused tools": () => {
    const tools = { look: tool({ description: "Look at a thing.", inputSchema: schema }) };
    return refused(generateText({ ...common, model: quire(told.model), prompt: told.question, tools }), /tool calls/);
  },
  "refused objects": () => {
    const model = createOpenAICompatible({ ...settings, supportsStructuredOutputs: true })(told.model);
    return refused(generateObject({ ...common, model, prompt: told.question, schema }), /structured output/);
  },
};

await checks[process.argv[2]]();
