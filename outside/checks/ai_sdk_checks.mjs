// Checks of the AI SDK with three of its providers: OpenAI (Responses), OpenAI-compatible servers (chat completions) and
// Anthropic (Messages).
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { check, MODEL, URL_ } from "./checking.mjs";

const providers = {
  chat: createOpenAICompatible({
    name: "helexa",
    baseURL: `${URL_}/v1`,
    apiKey: "any",
    supportsStructuredOutputs: true,
    includeUsage: true,
  }),
  responses: createOpenAI({ baseURL: `${URL_}/v1`, apiKey: "any" }),
  messages: createAnthropic({ baseURL: `${URL_}/v1`, apiKey: "any" }),
};
const short = { maxOutputTokens: 200, temperature: 0, maxRetries: 0 };

for (const [kind, provider] of Object.entries(providers)) {
  const model = provider(MODEL);

  await check(`${kind} plain`, async () => {
    const found = await generateText({ model, ...short, prompt: "Say hello." });
    assert(found.text);
    assert(found.usage.outputTokens > 0);
  });

  await check(`${kind} streamed`, async () => {
    let text = "";
    for await (const part of streamText({ model, ...short, prompt: "Say hello." }).textStream) text += part;
    assert(text);
  });

  await check(`${kind} required tool and its result`, async () => {
    const cities = [];
    const get_weather = tool({
      description: "Return the weather of a city.",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => (cities.push(city), "clear sky"),
    });
    const found = await generateText({
      model,
      ...short,
      prompt: "What is the weather in Paris?",
      tools: { get_weather },
      toolChoice: "required",
      providerOptions: {
        helexa: { parallel_tool_calls: false },
        openai: { parallelToolCalls: false },
        anthropic: { disableParallelToolUse: true },
      },
      stopWhen: stepCountIs(2),
    });
    assert(cities.length > 0);
    assert(found.steps.length > 0);
  });

  await check(`${kind} schema`, async () => {
    const output = Output.object({ schema: z.object({ name: z.string() }) });
    const found = await generateText({ model, ...short, prompt: "My name is Ada.", output });
    assert(found.output.name);
  });

  await check(`${kind} error of an unknown model`, async () => {
    const asked = generateText({ model: provider("no-such-model"), maxRetries: 0, prompt: "Hello" });
    await assert.rejects(asked, (error) => APICallError.isInstance(error) && error.statusCode === 404);
  });
}
