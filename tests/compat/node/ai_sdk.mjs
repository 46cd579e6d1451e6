// The Vercel AI SDK with its OpenAI-compatible provider against the servers of `tests.compat`:
// node ai_sdk.mjs SETTING_JSON

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { CITIES, QUESTION, WEATHER, WEATHER_ANSWER, run } from "./setting.mjs";

// supportsStructuredOutputs: it then sends json_schema, and not json_object.
const provider = (baseURL) => createOpenAICompatible({ name: "intarsia", baseURL, supportsStructuredOutputs: true });
const City = z.object({ city: z.enum(CITIES), is_capital: z.boolean() });
const once = { temperature: 0, maxRetries: 0 };

async function chat({ base, model, prompt_ids, answer }) {
  const given = await generateText({ model: provider(base).chatModel(model), prompt: QUESTION, ...once });
  assert.equal(given.text, answer);
  assert.equal(given.finishReason, "stop");
  assert.equal(given.usage.inputTokens, prompt_ids.length);
}

async function chatStreamed({ base, model, answer }) {
  const stream = streamText({ model: provider(base).chatModel(model), prompt: QUESTION, ...once });
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  assert.equal(text, answer);
  assert.equal(await stream.finishReason, "stop");
}

function weather(asked) {
  const execute = async ({ city }) => (asked.push(city), WEATHER);
  return { get_weather: tool({ inputSchema: z.object({ city: z.enum(CITIES) }), execute }) };
}

// The SDK runs the tools and sends their results back by itself.
async function tools({ scripted, scripted_model }) {
  const asked = [];
  const model = provider(scripted).chatModel(scripted_model);
  const options = { model, prompt: "The weather in both?", stopWhen: stepCountIs(3), ...once };
  const given = await generateText({ ...options, tools: weather(asked) });
  assert.deepEqual(asked, ["Paris", "London"]);
  assert.equal(given.steps[0].finishReason, "tool-calls");
  assert.equal(given.text, WEATHER_ANSWER);
}

async function toolsStreamed({ scripted, scripted_model }) {
  const asked = [];
  const model = provider(scripted).chatModel(scripted_model);
  const options = { model, prompt: "The weather in both?", stopWhen: stepCountIs(3), ...once };
  const stream = streamText({ ...options, tools: weather(asked) });
  const kinds = new Set();
  for await (const part of stream.fullStream) kinds.add(part.type);
  assert.deepEqual(asked, ["Paris", "London"]);
  assert.ok(kinds.has("tool-input-delta") && kinds.has("tool-result") && !kinds.has("error"));
  assert.equal(await stream.text, WEATHER_ANSWER);
}

async function toolDemanded({ base, model }) {
  const options = { model: provider(base).chatModel(model), prompt: QUESTION, maxOutputTokens: 64, ...once };
  for (const toolChoice of ["required", { type: "tool", toolName: "get_weather" }]) {
    const given = await generateText({ ...options, tools: weather([]), toolChoice });
    assert.ok(CITIES.includes(given.toolCalls[0].input.city));
  }
}

async function structuredOutput({ base, model }) {
  const options = { model: provider(base).chatModel(model), prompt: QUESTION, maxOutputTokens: 128, ...once };
  const given = await generateText({ ...options, output: Output.object({ schema: City }) });
  City.parse(given.output);
  const stream = streamText({ ...options, output: Output.object({ schema: City }) });
  let last;
  for await (const partial of stream.partialOutputStream) last = partial;
  City.parse(last);
}

// The SDK's prompts are texts: neither ids nor embeddings.
async function completions({ base, model }) {
  const options = { model: provider(base).completionModel(model), prompt: "The capital of France is", ...once };
  const given = await generateText({ ...options, maxOutputTokens: 8 });
  const stream = streamText({ ...options, maxOutputTokens: 8 });
  assert.equal(given.finishReason, "length");
  assert.equal(await stream.text, given.text);
}

async function errors({ base, model }) {
  const hot = generateText({ model: provider(base).chatModel(model), prompt: QUESTION, maxRetries: 0, temperature: 3 });
  const known = (error) => APICallError.isInstance(error) && error.statusCode === 400 && !error.isRetryable;
  await assert.rejects(hot, known);
}

await run([chat, chatStreamed, tools, toolsStreamed, toolDemanded, structuredOutput, completions, errors]);
