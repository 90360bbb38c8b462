// Vercel's AI SDK with three providers: openai-compatible, openai (over responses and over chat), anthropic.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

import { BASE_URL, CAPITAL, FOLLOW_UP, GEORGE, MODEL, PERSON, REPORT, WEATHER } from "./questions.mjs";

const settings = { baseURL: BASE_URL, apiKey: "none" };
const compatible = createOpenAICompatible({
  ...settings,
  name: "quire",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI(settings);
const models = {
  compatible: compatible(MODEL),
  "openai over responses": openai(MODEL),
  "openai over chat": openai.chat(MODEL),
  anthropic: createAnthropic(settings)(MODEL),
};
const Person = z.object({ name: z.string(), age: z.number().int(), city: z.string() });
const get_weather = tool({
  description: "Get the weather of a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: ({ city }) => (assert.equal(city, "Paris"), REPORT),
});

for (const [name, model] of Object.entries(models)) {
  // by default the openai provider refers to answers that OpenAI has stored; nothing is stored here
  const common = { model, temperature: 0, maxRetries: 0, providerOptions: { openai: { store: false } } };

  test(`${name}: text, whole and streamed`, async () => {
    const whole = await generateText({ ...common, prompt: CAPITAL });
    assert.match(whole.text, /Paris/);
    assert.equal(whole.finishReason, "stop");
    assert.ok(whole.usage.outputTokens > 0);
    const stream = streamText({ ...common, prompt: CAPITAL });
    let text = "";
    for await (const part of stream.textStream) text += part;
    assert.equal(text, whole.text);
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  });

  test(`${name}: several turns`, async () => {
    const messages = [{ role: "user", content: CAPITAL }];
    messages.push(...(await generateText({ ...common, messages })).response.messages);
    messages.push({ role: "user", content: FOLLOW_UP });
    assert.match((await generateText({ ...common, messages })).text, /Madrid/);
  });

  test(`${name}: a tool is called and its result used`, async () => {
    const request = { ...common, prompt: WEATHER, tools: { get_weather }, stopWhen: stepCountIs(3) };
    assert.match((await generateText(request)).text, /18.*sunny/);
    const stream = streamText(request);
    await stream.consumeStream();
    assert.match(await stream.text, /18.*sunny/);
  });

  test(`${name}: structured output`, async () => {
    const output = Output.object({ schema: Person });
    assert.deepEqual((await generateText({ ...common, prompt: PERSON, output })).output, GEORGE);
  });
}
