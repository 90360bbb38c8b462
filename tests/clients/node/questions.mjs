// What every client asks the demo model, greedily, and what it knows: tests/clients/questions.py in JavaScript.

export const ROOT = process.env.QUIRE_URL;
export const BASE_URL = `${ROOT}/v1`;
export const MODEL = "quire-demo";
export const CAPITAL = "What is the capital of France?";
export const FOLLOW_UP = "And of Spain?";
export const WEATHER = "What is the weather in Paris?";
export const PERSON =
  "Take the facts from this text: George is 26 years old and lives in Dubai. Use JSON with the keys name, age, city.";
export const GEORGE = { name: "George", age: 26, city: "Dubai" };
export const REPORT = { temperature: 18, condition: "sunny" };
export const WEATHER_FUNCTION = {
  name: "get_weather",
  description: "Get the weather of a city.",
  parameters: {
    type: "object",
    properties: { city: { type: "string", description: "The city" } },
    required: ["city"],
    additionalProperties: false,
  },
};
