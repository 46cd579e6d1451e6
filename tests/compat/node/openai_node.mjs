// The `openai` package for Node against the servers of `tests.compat`: node openai_node.mjs SETTING_JSON

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { CITIES, CITY_SCHEMA, QUESTION, WEATHER, WEATHER_ANSWER, WEATHER_PARAMETERS, run } from "./setting.mjs";

const USER = [{ role: "user", content: QUESTION }];
const BOTH = [{ role: "user", content: "The weather in both?" }];
const TOOL = { type: "function", function: { name: "get_weather", parameters: WEATHER_PARAMETERS } };
const client = (baseURL) => new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });

async function chat({ base, model, prompt_ids, answer }) {
  const api = client(base);
  const models = [];
  for await (const each of api.models.list()) models.push(each.id);
  assert.deepEqual(models, [model]);
  const given = await api.chat.completions.create({ model, messages: USER, temperature: 0, logprobs: true });
  assert.equal(given.choices[0].message.content, answer);
  assert.equal(given.choices[0].finish_reason, "stop");
  assert.ok(given.choices[0].logprobs.content.map((entry) => entry.token).join("").startsWith(answer));
  assert.equal(given.usage.prompt_tokens, prompt_ids.length);
}

async function chatStreamed({ base, model, prompt_ids, answer }) {
  const options = { stream: true, stream_options: { include_usage: true } };
  const stream = await client(base).chat.completions.create({ model, messages: USER, temperature: 0, ...options });
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), answer);
  assert.equal(chunks.at(-1).usage.prompt_tokens, prompt_ids.length);
}

async function chatStreamedByHelper({ base, model, answer }) {
  const stream = client(base).chat.completions.stream({ model, messages: USER, temperature: 0 });
  assert.equal(await stream.finalContent(), answer);
}

async function abortedStream({ base, model, answer }) {
  const stream = await client(base).chat.completions.create({ model, messages: USER, stream: true });
  for await (const _ of stream) stream.controller.abort();
  const next = await client(base).chat.completions.create({ model, messages: USER, temperature: 0 });
  assert.equal(next.choices[0].message.content, answer);
}

async function tools({ scripted, scripted_model: model }) {
  const api = client(scripted);
  const first = await api.chat.completions.create({ model, messages: BOTH, tools: [TOOL] });
  const { message, finish_reason } = first.choices[0];
  assert.equal(finish_reason, "tool_calls");
  const cities = message.tool_calls.map((call) => JSON.parse(call.function.arguments).city);
  assert.deepEqual(cities, ["Paris", "London"]);
  const results = message.tool_calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: WEATHER }));
  const second = await api.chat.completions.create({ model, messages: [...BOTH, message, ...results], tools: [TOOL] });
  assert.equal(second.choices[0].message.content, WEATHER_ANSWER);
}

// The helper puts the streamed calls together, runs them, and sends their results back.
async function toolsRunByHelper({ scripted, scripted_model: model }) {
  const asked = [];
  const get_weather = ({ city }) => (asked.push(city), WEATHER);
  const tool = { type: "function", function: { ...TOOL.function, function: get_weather, parse: JSON.parse } };
  const runner = client(scripted).chat.completions.runTools({ model, messages: BOTH, tools: [tool], stream: true });
  assert.equal(await runner.finalContent(), WEATHER_ANSWER);
  assert.deepEqual(asked, ["Paris", "London"]);
}

async function toolDemanded({ base, model }) {
  for (const tool_choice of ["required", { type: "function", function: { name: "get_weather" } }]) {
    const demand = { tools: [TOOL], tool_choice, parallel_tool_calls: false };
    const body = { model, messages: USER, temperature: 0, max_tokens: 96, ...demand };
    const { choices } = await client(base).chat.completions.create(body);
    assert.equal(choices[0].message.tool_calls.length, 1);
    assert.ok(CITIES.includes(JSON.parse(choices[0].message.tool_calls[0].function.arguments).city));
  }
}

async function structuredOutput({ base, model }) {
  const response_format = { type: "json_schema", json_schema: { name: "city", strict: true, schema: CITY_SCHEMA } };
  const body = { model, messages: USER, temperature: 0, max_tokens: 128 };
  const { choices } = await client(base).chat.completions.create({ ...body, response_format });
  assert.ok(CITIES.includes(JSON.parse(choices[0].message.content).city));
  const Capital = z.object({ city: z.enum(CITIES), is_capital: z.boolean() });
  const parse = { ...body, response_format: zodResponseFormat(Capital, "capital") };
  const parsed = await client(base).chat.completions.parse(parse);
  assert.ok(CITIES.includes(parsed.choices[0].message.parsed.city));
}

// Token ids, then embeddings, each whole and streamed. What the package doesn't know it sends as it is.
async function completions({ base, model, prompt_ids, prompt_embeds, answer }) {
  const api = client(base);
  for (const prompt of [{ prompt: prompt_ids }, { prompt: null, prompt_embeds }]) {
    const body = { model, ...prompt, temperature: 0, max_tokens: 24 };
    const whole = await api.completions.create(body);
    assert.equal(whole.choices[0].text, answer);
    assert.equal(whole.usage.prompt_tokens, prompt_ids.length);
    let text = "";
    for await (const chunk of await api.completions.create({ ...body, stream: true })) text += chunk.choices[0].text;
    assert.equal(text, answer);
  }
}

async function responses({ base, model, prompt_ids, answer }) {
  const api = client(base);
  const body = { model, input: QUESTION, temperature: 0 };
  const whole = await api.responses.create(body);
  assert.equal(whole.output_text, answer);
  assert.equal(whole.usage.input_tokens, prompt_ids.length);
  assert.equal((await api.responses.stream(body).finalResponse()).output_text, answer);
  assert.equal((await api.responses.retrieve(whole.id)).output_text, answer);
  let background = await api.responses.create({ ...body, background: true });
  while (["queued", "in_progress"].includes(background.status)) background = await api.responses.retrieve(background.id);
  assert.equal(background.output_text, answer);
}

async function errors({ base, model }) {
  const api = client(base);
  const hot = api.chat.completions.create({ model, messages: USER, temperature: 3 });
  await assert.rejects(hot, (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
  const unknown = api.chat.completions.create({ model: "another", messages: USER });
  await assert.rejects(unknown, (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
}

await run([
  chat,
  chatStreamed,
  chatStreamedByHelper,
  abortedStream,
  tools,
  toolsRunByHelper,
  toolDemanded,
  structuredOutput,
  completions,
  responses,
  errors,
]);
