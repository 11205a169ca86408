// Settings of clients to copy, with the address of this gateway and the chosen model. docs/clients.md explains them.

import { get, session } from "./api.js";
import { asCurl, json as literal, shell } from "./code_samples.js";
import { html, useStore, useTabState } from "./lib.js";
import { Code, Empty, Failed, Loading, Notice, useLoad } from "./ui.js";

// Each client: name, what it is, and its files or commands as [title, text]. `v1` is the base URL with /v1. A node chooses
// the id `model`, so each text quotes it.
const CLIENTS = [
  {
    id: "curl",
    name: "curl",
    about: "one request on the command line",
    parts: ({ model, origin, needsKey }) => [
      ["shell", asCurl({ model, messages: [{ role: "user", content: "Hello" }], stream: true }, origin, needsKey)],
    ],
  },
  {
    id: "openai",
    name: "OpenAI SDK",
    about: "Python, and every client that reads OpenAI's variables",
    parts: ({ model, v1, key }) => [
      [
        "Python",
        `from openai import OpenAI\n\nclient = OpenAI(base_url="${v1}", api_key="${key}")\nanswer = client.chat.completions.create(\n    model=${literal(model)}, messages=[{"role": "user", "content": "Hello"}]\n)\nprint(answer.choices[0].message.content)\n`,
      ],
      ["environment", `export OPENAI_BASE_URL=${v1}\nexport OPENAI_API_KEY=${key}\n`],
    ],
  },
  {
    id: "anthropic",
    name: "Anthropic SDK",
    about: "Python, Messages API",
    parts: ({ model, origin, key }) => [
      [
        "Python",
        `from anthropic import Anthropic\n\nclient = Anthropic(base_url="${origin}", api_key="${key}")\nmessage = client.messages.create(\n    model=${literal(model)}, max_tokens=1024, messages=[{"role": "user", "content": "Hello"}]\n)\nprint(message.content[0].text)\n`,
      ],
      ["environment", `export ANTHROPIC_BASE_URL=${origin}\nexport ANTHROPIC_API_KEY=${key}\n`],
    ],
  },
  {
    id: "claude-code",
    name: "Claude Code",
    about: "coding agent",
    agent: true,
    parts: ({ model, origin, key, context, output }) => [
      [
        "shell",
        `export ANTHROPIC_BASE_URL=${origin}\nexport ANTHROPIC_AUTH_TOKEN=${key}\nexport ANTHROPIC_MODEL=${shell(model)}\nexport ANTHROPIC_DEFAULT_HAIKU_MODEL=${shell(model)}\nexport CLAUDE_CODE_MAX_CONTEXT_TOKENS=${context}\nexport CLAUDE_CODE_MAX_OUTPUT_TOKENS=${output}\nexport CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1\nexport CLAUDE_STREAM_IDLE_TIMEOUT_MS=3600000\nclaude\n`,
      ],
    ],
  },
  {
    id: "codex",
    name: "Codex",
    about: "coding agent",
    agent: true,
    parts: ({ model, v1, context, key }) => [
      [
        "~/.codex/config.toml",
        `model = ${literal(model)}\nmodel_provider = "helexa"\nmodel_context_window = ${context}\ncheck_for_update_on_startup = false\n\n[model_providers.helexa]\nname = "helexa"\nbase_url = "${v1}"\nenv_key = "HELEXA_API_KEY"\nwire_api = "responses"\n\n[features]\napps = false\nplugins = false\n\n[analytics]\nenabled = false\n`,
      ],
      ["shell", `export HELEXA_API_KEY=${key}\ncodex\n`],
    ],
  },
  {
    id: "opencode",
    name: "opencode",
    about: "coding agent",
    agent: true,
    parts: ({ model, v1, key, context, output }) => [
      [
        "~/.config/opencode/opencode.json",
        json({
          provider: {
            helexa: {
              npm: "@ai-sdk/openai-compatible",
              options: { baseURL: v1, apiKey: key },
              models: { [model]: { limit: { context, output } } },
            },
          },
          model: `helexa/${model}`,
          autoupdate: false,
        }),
      ],
    ],
  },
  {
    id: "pi",
    name: "pi",
    about: "coding agent",
    agent: true,
    parts: ({ model, v1, key, context, output, reasoning }) => [
      [
        "~/.pi/agent/models.json",
        json({
          providers: {
            helexa: {
              baseUrl: v1,
              api: "openai-completions",
              apiKey: key,
              models: [{ id: model, reasoning, contextWindow: context, maxTokens: output }],
            },
          },
        }),
      ],
      ["shell", `pi --provider helexa --model ${shell(model)}\n`],
    ],
  },
  {
    id: "zed",
    name: "Zed",
    about: "editor",
    parts: ({ model, v1, key, context, output, tools, vision }) => [
      [
        "settings.json",
        json({
          language_models: {
            openai_compatible: {
              helexa: {
                api_url: v1,
                available_models: [
                  {
                    name: model,
                    max_tokens: context,
                    max_output_tokens: output,
                    capabilities: { tools, images: vision, parallel_tool_calls: tools, prompt_cache_key: true },
                  },
                ],
              },
            },
          },
        }),
      ],
      ["environment", `export HELEXA_API_KEY=${key}\n`],
    ],
  },
  {
    id: "continue",
    name: "Continue",
    about: "editor extension",
    parts: ({ model, v1, key, context, output }) => [
      [
        "~/.continue/config.yaml",
        `name: helexa\nversion: 0.0.1\nschema: v1\nmodels:\n  - name: helexa\n    provider: openai\n    model: ${literal(model)}\n    apiBase: ${v1}\n    apiKey: ${key}\n    capabilities: [tool_use]\n    defaultCompletionOptions: {contextLength: ${context}, maxTokens: ${output}}\n`,
      ],
    ],
  },
  {
    id: "aider",
    name: "Aider",
    about: "coding agent, without tools",
    parts: ({ model, v1, key }) => [
      ["shell", `export OPENAI_API_BASE=${v1}\nexport OPENAI_API_KEY=${key}\naider --model ${shell(`openai/${model}`)}\n`],
    ],
  },
  {
    id: "langchain",
    name: "LangChain",
    about: "Python",
    parts: ({ model, v1, key }) => [
      [
        "Python",
        `from langchain_openai import ChatOpenAI\n\nmodel = ChatOpenAI(model=${literal(model)}, base_url="${v1}", api_key="${key}")\nprint(model.invoke("Hello").content)\n`,
      ],
    ],
  },
  {
    id: "open-webui",
    name: "Open WebUI",
    about: "chat in the browser, in a container",
    parts: ({ host, key }) => [
      [
        "shell",
        `docker run -p 3000:8080 --add-host=host.docker.internal:host-gateway -v open-webui:/app/backend/data \\\n  -e OPENAI_API_BASE_URL=${host}/v1 -e OPENAI_API_KEY=${key} ghcr.io/open-webui/open-webui:main\n`,
      ],
    ],
  },
];

const json = (value) => `${literal(value, 2)}\n`;

export default function Connect() {
  const value = useStore(session);
  const { data, error, reload } = useLoad(() => get("/v1/models"), [value?.account_id]);
  const [chosen, setChosen] = useTabState("connect-model", "");
  const [client, setClient] = useTabState("connect-client", "openai");
  const list = data?.data ?? [];
  const model = list.find((one) => one.id === chosen) ?? list.find((one) => one.state === "warm") ?? list[0];
  if (!data)
    return error ? html`<${Failed} error=${error} retry=${reload} />` : html`<${Loading} label="Loading the models" />`;
  if (!model)
    return html`<div class="title"><h1>Connect</h1></div><section class="card"><${Empty} title="No models">Add a model to the catalog or load one in Fleet; then this page shows the settings of clients.</${Empty}></section>`;
  const entry = CLIENTS.find((one) => one.id === client) ?? CLIENTS[0];
  const context = model.limit?.context ?? 32_768;
  const origin = location.origin,
    local = /^https?:\/\/(localhost|127\.0\.0\.1|\[::1\])(:|$)/.test(origin);
  const settings = {
    model: model.id,
    origin,
    v1: `${origin}/v1`,
    host: local ? origin.replace(/localhost|127\.0\.0\.1|\[::1\]/, "host.docker.internal") : origin,
    key: value?.require_auth ? "YOUR_KEY" : "any",
    needsKey: value?.require_auth,
    context,
    output: Math.min(8192, Math.floor(context / 4)),
    tools: Boolean(model.tool_call),
    vision: model.capabilities.includes("vision"),
    reasoning: Boolean(model.reasoning),
  };
  return html`<div class="title"><h1>Connect</h1><div class="tools"><label for="connect-model">Model</label>
      <select id="connect-model" value=${model.id} onChange=${(event) => setChosen(event.target.value)}>${list.map((one) => html`<option key=${one.id} value=${one.id}>${one.id}</option>`)}</select></div></div>
    <div class="connect"><nav class="card clients" aria-label="Clients">${CLIENTS.map((one) => html`<button key=${one.id} type="button" aria-current=${one.id === entry.id ? "true" : undefined} onClick=${() => setClient(one.id)}><b>${one.name}</b><span class="soft small">${one.about}</span></button>`)}</nav>
      <section class="card" aria-label=${entry.name}><div class="head"><h2>${entry.name}</h2><span class="soft small">${entry.about}</span></div><div class="body">
        ${entry.agent && !model.tool_call && html`<${Notice} title="This model calls no tools.">Coding agents need a model that calls tools; choose another model.</${Notice}>`}
        ${entry.agent && context < 16_000 && html`<${Notice} title="The context is short.">Coding agents send 1,500 to 19,000 tokens with the first message. This model has ${context.toLocaleString("en")}.</${Notice}>`}
        ${entry.parts(settings).map(([title, text]) => html`<${Code} key=${title} title=${title} text=${text} />`)}
        <p class="soft small">${value?.require_auth ? "Replace YOUR_KEY by your API key. The console does not know it: only its hash is stored." : "This gateway requires no key; clients need any text as a key."}
          ${entry.id === "open-webui" && local && " The gateway must listen on an address that the container can reach."}</p></div></section></div>`;
}
