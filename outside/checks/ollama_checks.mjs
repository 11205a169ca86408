// Checks of Ollama's JavaScript library: the examples of its README with another address, then its other functions.
import assert from "node:assert/strict";
import { readFileSync, writeFileSync } from "node:fs";
import { Ollama } from "ollama";
import { check, MODEL, URL_ } from "./checking.mjs";

const ollama = new Ollama({ host: URL_ });
const hello = { model: MODEL, messages: [{ role: "user", content: "Hello" }] };
const options = { num_predict: 20, temperature: 0 };
const readme = readFileSync(new URL("./node_modules/ollama/README.md", import.meta.url), "utf8");
const examples = [...readme.matchAll(/```javascript\n(.*?)```/gs)].map((match) => match[1]);

await check("examples of the readme", async () => {
  const used = examples.filter((code) => code.startsWith("import") && !/-cloud|ollama\.com|\/browser/.test(code));
  assert(used.length >= 4, `${used.length} examples`);
  for (const [index, code] of used.entries()) {
    const local = code
      .replace("import ollama from 'ollama'", `import { Ollama } from 'ollama'\nconst ollama = new Ollama({ host: '${URL_}' })`)
      .replace("http://127.0.0.1:11434", URL_);
    const file = new URL(`./readme_example_${index}.mjs`, import.meta.url);
    writeFileSync(file, local);
    await import(file.href);
  }
});

await check("stream equals the answer", async () => {
  const answer = await ollama.chat({ ...hello, options });
  let text = "";
  let last;
  for await (const part of await ollama.chat({ ...hello, options, stream: true })) {
    text += part.message.content;
    last = part;
  }
  assert.equal(text, answer.message.content);
  assert(last.done && last.eval_count === answer.eval_count && last.eval_duration > 0);
});

await check("models", async () => {
  const { models } = await ollama.list();
  assert(models.some((model) => model.name === MODEL && model.size > 0 && model.digest.length === 64));
  const shown = await ollama.show({ model: MODEL });
  const architecture = shown.model_info["general.architecture"];
  assert(shown.model_info[`${architecture}.context_length`] > 0);
  assert(shown.capabilities.includes("tools"));
  assert((await ollama.ps()).models.some((model) => model.name === MODEL));
  assert.match((await ollama.version()).version, /^\d+\.\d+\.\d+$/);
});

await check("pull of a model that the node has", async () => {
  const states = [];
  for await (const state of await ollama.pull({ model: MODEL, stream: true })) states.push(state.status);
  assert.equal(states.at(-1), "success");
});

await check("embeddings", async () => {
  const { embeddings } = await ollama.embed({ model: MODEL, input: ["The sky is blue", "Grass is green"] });
  assert.equal(embeddings.length, 2);
});

await check("schema", async () => {
  const format = { type: "object", properties: { name: { enum: ["Ada", "Bob"] } }, required: ["name"] };
  const messages = [{ role: "user", content: "My name is Ada. Answer as JSON." }];
  const answer = await ollama.chat({ model: MODEL, messages, format });
  assert(["Ada", "Bob"].includes(JSON.parse(answer.message.content).name));
});

await check("abort", async () => {
  const stream = await ollama.chat({ ...hello, stream: true });
  await assert.rejects(
    async () => {
      for await (const _ of stream) ollama.abort();
    },
    { name: "AbortError" },
  );
});

await check("errors", async () => {
  await assert.rejects(ollama.chat({ ...hello, model: "no-such-model" }), { status_code: 404 });
  await assert.rejects(ollama.delete({ model: MODEL }), { status_code: 501 });
});
