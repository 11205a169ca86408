// Checks of @anthropic-ai/sdk, used as its README describes, and of its tool runner.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";
import { check, MODEL } from "./checking.mjs";

const client = new Anthropic({ maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const hello = { model: MODEL, max_tokens: 30, messages: [{ role: "user", content: "Hello, Claude" }] };
const tool = {
  name: "get_weather",
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};

await check("models", async () => {
  const ids = [];
  for await (const model of client.models.list({ limit: 1 })) ids.push(model.id);
  assert(ids.includes(MODEL));
});

await check("message", async () => {
  const found = await client.messages.create(hello);
  assert(found.content[0].text);
});

await check("message streamed", async () => {
  const kinds = [];
  for await (const event of await client.messages.create({ ...hello, stream: true })) kinds.push(event.type);
  assert.equal(kinds[0], "message_start");
  assert.equal(kinds.at(-1), "message_stop");
});

await check("stream helper", async () => {
  let text = "";
  const stream = client.messages.stream(hello).on("text", (delta) => (text += delta));
  const found = await stream.finalMessage();
  assert.equal(found.content[0].text, text);
});

await check("forced tool", async () => {
  const tool_choice = { type: "any", disable_parallel_tool_use: true }; // a small model may repeat calls
  const asked = { ...hello, messages, tools: [tool], tool_choice, max_tokens: 200 };
  const found = await client.messages.create(asked);
  assert.equal(found.stop_reason, "tool_use");
  assert("city" in found.content.find((block) => block.type === "tool_use").input);
});

await check("tool runner", async () => {
  const cities = [];
  const weather = betaZodTool({
    name: "get_weather",
    description: "Return the weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    run: ({ city }) => (cities.push(city), "clear sky"),
  });
  const asked = { ...hello, messages, tools: [weather], max_tokens: 200, max_iterations: 2 };
  const runner = client.beta.messages.toolRunner({ ...asked, tool_choice: { type: "tool", name: "get_weather" } });
  for await (const message of runner) assert(message.id);
  assert(cities.length > 0);
});

await check("error of an unknown model", async () => {
  await assert.rejects(client.messages.create({ ...hello, model: "no-such-model" }), Anthropic.NotFoundError);
});
