// Anthropic's client for Node.

import assert from "node:assert/strict";
import { test } from "node:test";

import Anthropic from "@anthropic-ai/sdk";

import { CAPITAL, MODEL, REPORT, ROOT, WEATHER, WEATHER_FUNCTION } from "./questions.mjs";

const client = new Anthropic({ baseURL: ROOT, apiKey: "none", maxRetries: 0 });
const { name, description, parameters: input_schema } = WEATHER_FUNCTION;
const tools = [{ name, description, input_schema }];
const ask = (content, more = {}) => ({
  model: MODEL,
  max_tokens: 200,
  temperature: 0,
  messages: [{ role: "user", content }],
  ...more,
});

test("text, whole and streamed", async () => {
  const whole = await client.messages.create(ask(CAPITAL));
  assert.match(whole.content[0].text, /Paris/);
  assert.equal(await client.messages.stream(ask(CAPITAL)).finalText(), whole.content[0].text);
});

test("a tool is called and its result used", async () => {
  const first = await client.messages.stream(ask(WEATHER, { tools })).finalMessage();
  assert.equal(first.stop_reason, "tool_use");
  const call = first.content.find((block) => block.type === "tool_use");
  assert.deepEqual(call.input, { city: "Paris" });
  const result = { type: "tool_result", tool_use_id: call.id, content: JSON.stringify(REPORT) };
  const messages = [
    { role: "user", content: WEATHER },
    { role: "assistant", content: first.content },
    { role: "user", content: [result] },
  ];
  assert.match((await client.messages.create(ask("", { tools, messages }))).content[0].text, /18.*sunny/);
});

test("errors are the client's own", async () => {
  await assert.rejects(client.messages.create(ask(CAPITAL, { model: "nobody" })), Anthropic.NotFoundError);
});
