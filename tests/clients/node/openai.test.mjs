// OpenAI's client for Node: chat completions and responses.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

import { BASE_URL, CAPITAL, FOLLOW_UP, GEORGE, MODEL, PERSON, REPORT, WEATHER, WEATHER_FUNCTION } from "./questions.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: "none", maxRetries: 0 });
const Person = z.object({ name: z.string(), age: z.number().int(), city: z.string() });
const tools = [{ type: "function", function: WEATHER_FUNCTION }];
const ask = (content, more = {}) => ({ model: MODEL, temperature: 0, messages: [{ role: "user", content }], ...more });
const respond = (input, more = {}) => ({ model: MODEL, temperature: 0, store: false, input, ...more });

test("models", async () => {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert.deepEqual(names, [MODEL]);
});

test("chat, whole and streamed", async () => {
  const whole = (await client.chat.completions.create(ask(CAPITAL))).choices[0].message.content;
  assert.match(whole, /Paris/);
  let text = "";
  for await (const chunk of await client.chat.completions.create(ask(CAPITAL, { stream: true }))) {
    text += chunk.choices[0].delta.content ?? "";
  }
  assert.equal(text, whole);
});

test("chat, several turns", async () => {
  const messages = [{ role: "user", content: CAPITAL }];
  messages.push((await client.chat.completions.create(ask("", { messages }))).choices[0].message);
  messages.push({ role: "user", content: FOLLOW_UP });
  assert.match((await client.chat.completions.create(ask("", { messages }))).choices[0].message.content, /Madrid/);
});

test("chat, a tool is run by the helper", async () => {
  const get_weather = { ...WEATHER_FUNCTION, parse: JSON.parse, function: () => JSON.stringify(REPORT) };
  const armed = [{ type: "function", function: get_weather }];
  for (const stream of [false, true]) {
    const runner = client.chat.completions.runTools(ask(WEATHER, { tools: armed, stream }));
    assert.match(await runner.finalContent(), /18.*sunny/);
  }
});

test("chat, a streamed tool call is the whole one", async () => {
  const whole = (await client.chat.completions.create(ask(WEATHER, { tools }))).choices[0];
  assert.equal(whole.finish_reason, "tool_calls");
  const streamed = await client.chat.completions.stream(ask(WEATHER, { tools })).finalMessage();
  assert.deepEqual(streamed.tool_calls[0].function.arguments, whole.message.tool_calls[0].function.arguments);
});

test("chat, structured output", async () => {
  const format = { response_format: zodResponseFormat(Person, "person") };
  assert.deepEqual((await client.chat.completions.parse(ask(PERSON, format))).choices[0].message.parsed, GEORGE);
});

test("responses, whole and streamed", async () => {
  const whole = (await client.responses.create(respond(CAPITAL))).output_text;
  assert.match(whole, /Paris/);
  const stream = client.responses.stream(respond(CAPITAL));
  let text = "";
  for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
  assert.equal(text, whole);
  assert.equal((await stream.finalResponse()).output_text, whole);
});

test("responses, tools over two turns", async () => {
  const more = { tools: [{ type: "function", strict: true, ...WEATHER_FUNCTION }] };
  const input = [{ role: "user", content: WEATHER }];
  const { output } = await client.responses.create(respond(input, more));
  const call = output.find((item) => item.type === "function_call");
  assert.deepEqual(JSON.parse(call.arguments), { city: "Paris" });
  input.push(...output, { type: "function_call_output", call_id: call.call_id, output: JSON.stringify(REPORT) });
  assert.match((await client.responses.create(respond(input, more))).output_text, /18.*sunny/);
});

test("responses, structured output", async () => {
  const text = { format: zodTextFormat(Person, "person") };
  assert.deepEqual((await client.responses.parse(respond(PERSON, { text }))).output_parsed, GEORGE);
});

test("errors are the client's own", async () => {
  await assert.rejects(client.chat.completions.create(ask(CAPITAL, { model: "nobody" })), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create(ask(CAPITAL, { n: 1000 })), OpenAI.BadRequestError);
});
