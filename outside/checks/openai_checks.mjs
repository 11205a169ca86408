// Checks of openai-node, used as its README describes, and of its tool runners.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { check, MODEL } from "./checking.mjs";

const client = new OpenAI({ maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const hello = [{ role: "user", content: "Say this is a test" }];
const tool = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
};

await check("models", async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert(ids.includes(MODEL));
});

await check("chat", async () => {
  const found = await client.chat.completions.create({ model: MODEL, messages: hello, max_tokens: 30 });
  assert(found.choices[0].message.content);
});

await check("chat streamed", async () => {
  const stream = await client.chat.completions.create({ model: MODEL, messages: hello, max_tokens: 30, stream: true });
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0].delta.content ?? "";
  assert(text);
});

await check("stream helper", async () => {
  const stream = client.chat.completions.stream({ model: MODEL, messages: hello, max_tokens: 30 });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const found = await stream.finalChatCompletion();
  assert.equal(found.choices[0].message.content, text);
});

await check("required tool", async () => {
  const asked = { model: MODEL, messages, tools: [tool], tool_choice: "required", max_tokens: 200 };
  const found = await client.chat.completions.create(asked);
  assert("city" in JSON.parse(found.choices[0].message.tool_calls[0].function.arguments));
});

await check("tool runner", async () => {
  const cities = [];
  const weather = zodFunction({
    name: "get_weather",
    parameters: z.object({ city: z.string() }),
    function: ({ city }) => (cities.push(city), "clear sky"),
  });
  const asked = { model: MODEL, messages, tools: [weather], max_tokens: 200 };
  const runner = client.chat.completions.runTools({
    ...asked,
    tool_choice: { type: "function", function: { name: "get_weather" } }, // the tool runner ends after one call
  });
  await runner.done();
  assert(cities.length > 0);
});

await check("parsed answer", async () => {
  const Event = z.object({ name: z.string(), day: z.string() });
  const found = await client.chat.completions.parse({
    model: MODEL,
    messages: [{ role: "user", content: "Alice goes to a science fair on Friday." }],
    response_format: zodResponseFormat(Event, "event"),
    max_tokens: 200,
  });
  assert(found.choices[0].message.parsed.name);
});

await check("response", async () => {
  const asked = { model: MODEL, instructions: "Be brief.", input: "Say this is a test", max_output_tokens: 30 };
  assert((await client.responses.create(asked)).output_text);
});

await check("response streamed", async () => {
  const kinds = [];
  const asked = { model: MODEL, input: "Say this is a test", max_output_tokens: 30, stream: true };
  for await (const event of await client.responses.create(asked)) kinds.push(event.type);
  assert.equal(kinds[0], "response.created");
  assert(kinds.includes("response.output_text.delta"));
});

await check("error of an unknown model", async () => {
  await assert.rejects(client.chat.completions.create({ model: "no-such-model", messages }), OpenAI.NotFoundError);
});

await check("error of a bad value", async () => {
  const asked = { model: MODEL, messages, temperature: 17 };
  await assert.rejects(client.chat.completions.create(asked), OpenAI.BadRequestError);
});
