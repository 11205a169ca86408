// The playground: chat with one model, or with two models side by side.

import { get, session } from "./api.js";
import { ask, speed } from "./chat.js";
import { asCurl, asPython } from "./code_samples.js";
import { compact, context, duration, html, memo, plural, rate, useEffect, useLayoutEffect, useMemo, useRef, useState, useStore, useTabState } from "./lib.js";
import { blocks, toHtml } from "./markdown.js";
import { Code, CopyButton, Dialog, Empty, Failed, Loading, Notice, toast, useLoad } from "./ui.js";

const MOST_IMAGES = 4, MOST_IMAGE_BYTES = 8 << 20;
const NO_PARAMETERS = { system: "", temperature: "", top_p: "", max_tokens: "", seed: "", stop: "", thinking: "", tools: "" };

export default function Playground({ query }) {
  const account = session.get()?.account_id ?? "";
  const models = useLoad(() => get("/v1/models"), []);
  const [panes, setPanes] = useTabState(`chat:${account}`, [{ model: "", turns: [] }]);
  const [parameters, setParameters] = useTabState(`parameters:${account}`, NO_PARAMETERS);
  const [draft, setDraft] = useTabState(`draft:${account}`, "");
  const [images, setImages] = useState([]);
  const [settings, setSettings] = useState(false);
  const [sample, setSample] = useState(null);
  const [running, setRunning] = useState({});
  const current = useRef(panes);
  current.current = panes;
  const list = models.data?.data ?? [];
  const asked = query.get("model");
  useEffect(() => {
    if (asked) { setPane(0, () => ({ model: asked })); history.replaceState(null, "", "#/playground"); }
  }, [asked]);
  useEffect(() => {
    if (!list.length) return;
    const first = (list.find((one) => one.state === "warm" && !/embed/i.test(one.id)) ?? list[0]).id;
    setPanes((all) => (all.some((pane) => !pane.model) ? all.map((pane) => (pane.model ? pane : { ...pane, model: first })) : all));
  }, [models.data]);
  // Streams end when the view closes. What has arrived is kept, and says so when the view opens again.
  useEffect(() => {
    const interrupted = { code: "cut", message: "The page was left or reloaded while the answer streamed." };
    setPanes((all) => all.map((pane) => ({ ...pane, turns: pane.turns.map((turn) => (turn.state === "running" ? { ...turn, state: "failed", error: interrupted } : turn)) })));
  }, []);
  const controllers = useRef(new Map());
  useEffect(() => () => { for (const controller of controllers.current.values()) controller.abort(); }, []);

  function setPane(index, change) {
    setPanes((all) => all.map((pane, position) => (position === index ? { ...pane, ...change(pane) } : pane)));
  }
  const [problem, extra] = useMemo(() => readParameters(parameters), [parameters]);
  const modelOf = (pane) => list.find((one) => one.id === pane.model);
  const sees = panes.some((pane) => modelOf(pane)?.capabilities?.includes("vision"));

  const bodyFor = (pane, turns) => ({
    model: pane.model,
    messages: messagesOf(parameters.system, turns, modelOf(pane)?.capabilities?.includes("vision")),
    stream: true,
    stream_options: { include_usage: true },
    ...extra,
  });

  async function run(index, turns) {
    const pane = current.current[index];
    const controller = new AbortController();
    controllers.current.get(index)?.abort();
    controllers.current.set(index, controller);
    setRunning((all) => ({ ...all, [index]: true }));
    const answer = { role: "assistant", model: pane.model, at: Date.now(), state: "running", text: "", reasoning: "", calls: [] };
    setPane(index, () => ({ turns: [...turns, answer] }));
    const update = (part) => setPane(index, (old) => ({ turns: old.turns.map((turn) => (turn.at === answer.at && turn.role === "assistant" ? { ...turn, ...part } : turn)) }));
    const result = await ask(bodyFor(pane, turns), controller.signal, update);
    update({ ...result, state: result.error ? "failed" : result.finish === "stopped" ? "stopped" : "done" });
    if (controllers.current.get(index) === controller) {
      controllers.current.delete(index);
      setRunning((all) => ({ ...all, [index]: false }));
    }
  }
  const busy = Object.values(running).some(Boolean);
  const submit = () => {
    const text = draft.trim();
    if (busy || problem || !(text || images.length)) return;
    const turn = { role: "user", text: draft, images, at: Date.now() };
    setDraft("");
    setImages([]);
    panes.forEach((pane, index) => run(index, [...pane.turns, turn]));
  };
  const stop = () => { for (const controller of controllers.current.values()) controller.abort(); };
  const clear = () => {
    stop();
    const before = panes;
    setPanes((all) => all.map((pane) => ({ ...pane, turns: [] })));
    toast("The conversation is cleared.", { action: { label: "Undo", run: () => setPanes(before) } });
  };
  const retry = (index, at) => {
    const turns = current.current[index].turns;
    run(index, turns.slice(0, turns.findIndex((turn) => turn.at === at && turn.role === "assistant")));
  };
  const answerCalls = (index, at, results) => {
    const turns = current.current[index].turns;
    const calls = turns.find((turn) => turn.at === at && turn.role === "assistant").calls;
    run(index, [...turns, ...calls.map((call, position) => ({ role: "tool", id: call.id, name: call.name, text: results[position] ?? "", at: Date.now() + position }))]);
  };
  const compare = () => setPanes((all) => (all.length === 2 ? [all[0]] : [all[0], { model: (list.find((one) => one.state === "warm" && one.id !== all[0].model) ?? list.find((one) => one.id !== all[0].model) ?? {}).id ?? all[0].model, turns: [] }]));
  const show = (index) => {
    const pane = panes[index], turns = pane.turns.filter((turn) => turn.state !== "running" && turn.state !== "failed");
    const pending = draft.trim() || turns.length === 0 ? [...turns, { role: "user", text: draft.trim() || "Hello", images }] : turns;
    setSample(bodyFor(pane, pending.at(-1).role === "assistant" ? pending.slice(0, -1) : pending));
  };
  if (models.error && !models.data) return html`<${Failed} error=${models.error} retry=${models.reload} />`;
  if (!models.data) return html`<${Loading} label="Loading the models" />`;
  if (!list.length) return html`<section class="card"><${Empty} title="No models">This gateway has no model that this key may use. Load a model in Fleet, or add one to the catalog.</${Empty}></section>`;
  return html`
    <div class="title"><h1>Playground</h1><div class="tools">
      <button type="button" class="button" aria-pressed=${panes.length === 2} onClick=${compare} disabled=${busy}>Compare</button>
      <button type="button" class="button" aria-expanded=${settings} aria-controls="parameters" onClick=${() => setSettings(!settings)}>Parameters${Object.keys(extra).length || parameters.system ? " •" : ""}</button>
      <button type="button" class="button" onClick=${clear} disabled=${!panes.some((pane) => pane.turns.length)}>New chat</button></div></div>
    ${settings && html`<${Parameters} value=${parameters} set=${setParameters} problem=${problem} reasons=${panes.some((pane) => modelOf(pane)?.reasoning)} />`}
    <div class=${`panes count-${panes.length}`}>${panes.map((pane, index) => html`<${Pane} key=${index} index=${index} pane=${pane} models=${list} model=${modelOf(pane)} running=${running[index]}
      choose=${(model) => setPane(index, () => ({ model }))} show=${() => show(index)} retry=${(at) => retry(index, at)} answerCalls=${(at, results) => answerCalls(index, at, results)} stop=${() => controllers.current.get(index)?.abort()} />`)}</div>
    <${Composer} draft=${draft} setDraft=${setDraft} images=${images} setImages=${setImages} sees=${sees} busy=${busy} submit=${submit} stop=${stop} problem=${problem} />
    ${sample && html`<${Sample} body=${sample} onClose=${() => setSample(null)} />`}`;
}

// The messages of a request. Models that see no images get the text alone.
function messagesOf(system, turns, vision) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    if (turn.role === "user") {
      const parts = vision ? (turn.images ?? []).map((image) => ({ type: "image_url", image_url: { url: image.url } })) : [];
      messages.push({ role: "user", content: parts.length ? [{ type: "text", text: turn.text }, ...parts] : turn.text });
    } else if (turn.role === "tool") messages.push({ role: "tool", tool_call_id: turn.id, content: turn.text });
    else if (turn.state !== "failed" || turn.text || turn.calls.length) {
      const calls = turn.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
      if (turn.text || calls.length) messages.push({ role: "assistant", content: turn.text || null, ...(calls.length ? { tool_calls: calls } : {}) });
    }
  }
  return messages;
}

// Return [problem, fields of the request]. Empty parameters are left out, so that the model's defaults apply.
function readParameters(parameters) {
  const fields = {};
  const numbers = { temperature: [0, 2], top_p: [0, 1], max_tokens: [1, 1e9], seed: [0, 2 ** 53] };
  for (const [name, [low, high]] of Object.entries(numbers)) {
    if (String(parameters[name]).trim() === "") continue;
    const value = Number(parameters[name]);
    if (!Number.isFinite(value) || value < low || value > high || (name !== "temperature" && name !== "top_p" && !Number.isInteger(value))) return [`${name} must be a number from ${low} to ${compact(high)}.`, {}];
    fields[name] = value;
  }
  if (parameters.stop) fields.stop = parameters.stop.split("\n").filter(Boolean);
  if (parameters.thinking) fields.enable_thinking = parameters.thinking === "on";
  if (parameters.tools.trim()) {
    try {
      const tools = JSON.parse(parameters.tools);
      if (!Array.isArray(tools)) throw new Error("not a list");
      fields.tools = tools.map((tool) => (tool.type === "function" ? tool : { type: "function", function: tool }));
    } catch (error) { return [`The tools are not a JSON list: ${error.message}`, {}]; }
  }
  return ["", fields];
}

function Parameters({ value, set, problem, reasons }) {
  const field = (name) => ({ id: `p-${name}`, value: value[name], onInput: (event) => set({ ...value, [name]: event.target.value }) });
  return html`<section class="card parameters" id="parameters" aria-label="Parameters"><div class="body form">
    <label class="full">System prompt <textarea rows="2" dir="auto" ...${field("system")}></textarea></label>
    <label>Temperature <input inputmode="decimal" placeholder="model's default" ...${field("temperature")} /></label>
    <label>Top p <input inputmode="decimal" placeholder="model's default" ...${field("top_p")} /></label>
    <label>Maximum tokens <input inputmode="numeric" placeholder="free context" ...${field("max_tokens")} /></label>
    <label>Seed <input inputmode="numeric" placeholder="random" ...${field("seed")} /></label>
    <label>Reasoning <select ...${field("thinking")}><option value="">default</option><option value="on">on</option><option value="off">off</option></select></label>
    <label>Stop strings, one per line <textarea rows="1" ...${field("stop")}></textarea></label>
    <label class="full">Tools, a JSON list of functions <textarea rows="3" class="mono" spellcheck=${false} placeholder='[{"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]' ...${field("tools")}></textarea></label>
    ${value.thinking && !reasons && html`<p class="soft small full">The chosen model has no switch for reasoning.</p>`}
    ${problem && html`<p class="callout failed full" role="alert">${problem}</p>`}
    <div class="actions full"><button type="button" class="button" onClick=${() => set(NO_PARAMETERS)}>Reset</button></div></div></section>`;
}

const STATE_WORDS = { warm: "warm", loading: "loading", recovering: "recovering", cold: "cold: loads first" };

function Pane({ index, pane, models, model, running, choose, show, retry, answerCalls, stop }) {
  const scroller = useRef(null), pinned = useRef(true);
  useLayoutEffect(() => { if (pinned.current && scroller.current) scroller.current.scrollTop = scroller.current.scrollHeight; });
  const onScroll = () => {
    const box = scroller.current;
    pinned.current = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  };
  const id = `model-${index}`;
  return html`<section class="card pane" aria-label=${`Chat with ${pane.model}`}>
    <div class="pane-head"><label class="unseen" for=${id}>Model</label>
      <select id=${id} value=${pane.model} disabled=${running} onChange=${(event) => choose(event.target.value)}>
        ${!model && pane.model && html`<option value=${pane.model}>${pane.model} (not available)</option>`}
        ${models.map((one) => html`<option key=${one.id} value=${one.id}>${one.id}${one.state === "warm" ? "" : ` (${one.state})`}</option>`)}</select>
      <span class="soft small">${model ? [STATE_WORDS[model.state], model.limit && `${context(model.limit.context)} context`, model.capabilities.includes("vision") && "sees images"].filter(Boolean).join(" · ") : "not available"}</span>
      <button type="button" class="plain small" onClick=${show}>Copy as code</button></div>
    <div class="turns" ref=${scroller} onScroll=${onScroll} tabindex="0" role="log" aria-live="off" aria-label="Conversation">
      ${pane.turns.length ? pane.turns.map((turn) => html`<${Turn} key=${`${turn.role}${turn.at}`} turn=${turn} running=${running} retry=${retry} answerCalls=${answerCalls} stop=${stop} />`)
        : html`<${Empty} title="Start a conversation">The answer streams here, with its speed. Nothing is stored on the gateway.</${Empty}>`}
    </div></section>`;
}

const Turn = memo(function Turn({ turn, running, retry, answerCalls, stop }) {
  if (turn.role === "user") return html`<article class="turn user" aria-label="You"><div class="bubble" dir="auto">${turn.text}</div>
    ${turn.images?.length > 0 && html`<div class="thumbs">${turn.images.map((image) => html`<img src=${image.url} alt=${image.name} />`)}</div>`}</article>`;
  if (turn.role === "tool") return html`<article class="turn tool" aria-label="Tool result"><span class="soft small">Result of ${turn.name}</span><pre tabindex="0" dir="auto">${turn.text}</pre></article>`;
  const live = turn.state === "running";
  return html`<article class="turn assistant" aria-label="Answer" aria-busy=${live}>
    ${turn.reasoning && html`<details class="thinking" open=${live && !turn.text}><summary>Reasoning${live && !turn.text ? "…" : ""} <span class="soft">${plural(turn.reasoning.length, "character")}</span></summary><div class="reasoning" dir="auto">${turn.reasoning}</div></details>`}
    <${Markdown} text=${turn.text} />
    ${turn.calls?.map((call) => html`<div class="call"><span class="badge">tool call</span> <b>${call.name}</b><pre tabindex="0" dir="auto">${pretty(call.arguments)}</pre></div>`)}
    ${live && !turn.text && !turn.reasoning && html`<p class="soft waiting">${waitingWords(turn.progress)}</p>`}
    ${turn.error && html`<${Notice} kind="failed" title=${turn.text || turn.reasoning ? "The answer is incomplete." : "There is no answer."}>${turn.error.message}</${Notice}>`}
    ${turn.finish === "length" && html`<p class="soft small">The answer reached the output limit.</p>`}
    <${TurnFoot} turn=${turn} live=${live} running=${running} retry=${retry} stop=${stop} />
    ${!live && turn.finish === "tool_calls" && !running && html`<${ToolResults} turn=${turn} answerCalls=${answerCalls} />`}
  </article>`;
});

const waitingWords = (progress) => (!progress ? "Waiting for the first token…" : /load/.test(progress) ? `The model is ${progress}…` : "The node is reading the prompt…");

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

function TurnFoot({ turn, live, running, retry, stop }) {
  const { first, rate: perSecond, tokens } = speed(turn);
  const words = [
    turn.state === "stopped" && "stopped",
    first != null && `first token ${duration(first)}`,
    perSecond != null && `${rate(perSecond)} tok/s`,
    tokens != null && plural(tokens, "token"),
    turn.usage?.prompt_tokens_details?.cached_tokens > 0 && `${compact(turn.usage.prompt_tokens_details.cached_tokens)} of ${compact(turn.usage.prompt_tokens)} prompt tokens cached`,
    turn.usage?.completion_tokens_details?.reasoning_tokens > 0 && `${compact(turn.usage.completion_tokens_details.reasoning_tokens)} for reasoning`,
  ].filter(Boolean);
  const node = /node=([^;]+)/.exec(turn.route ?? "")?.[1];
  return html`<div class="turn-foot"><span class="small soft">${[turn.model, node && `on ${node}`, ...words].filter(Boolean).join(" · ")}</span>
    ${live ? html`<button type="button" class="plain small" onClick=${stop}>Stop</button>`
      : html`${turn.text && html`<${CopyButton} text=${turn.text} className="plain small" />`}
        ${!running && html`<button type="button" class="plain small" onClick=${() => retry(turn.at)}>${turn.error ? "Try again" : "Answer again"}</button>`}`}</div>`;
}

function ToolResults({ turn, answerCalls }) {
  const [results, setResults] = useState(turn.calls.map(() => ""));
  return html`<form class="form results" onSubmit=${(event) => { event.preventDefault(); answerCalls(turn.at, results); }}>
    ${turn.calls.map((call, position) => html`<label>Result of ${call.name} <textarea rows="2" required dir="auto" value=${results[position]} onInput=${(event) => setResults(results.map((old, at) => (at === position ? event.target.value : old)))}></textarea></label>`)}
    <div class="actions"><button class="button">Send ${plural(turn.calls.length, "result")}</button></div></form>`;
}

const Markdown = memo(function Markdown({ text }) {
  return html`<div class="markdown" dir="auto">${blocks(text).map((block, index) => (block.kind === "code"
    ? html`<${CodeBlock} key=${index} text=${block.text} language=${block.language} />`
    : block.kind === "plain" ? html`<p key=${index} class="plain-text" dir="auto">${block.text}</p>` : html`<${TextBlock} key=${index} text=${block.text} />`))}</div>`;
});
const CodeBlock = memo(({ text, language }) => html`<${Code} text=${text} language=${language} />`);
const TextBlock = memo(({ text }) => html`<div class="block" dir="auto" dangerouslySetInnerHTML=${{ __html: toHtml(text) }}></div>`);

function Composer({ draft, setDraft, images, setImages, sees, busy, submit, stop, problem }) {
  const field = useRef(null), files = useRef(null);
  useEffect(() => {
    const box = field.current;
    box.style.height = "auto";
    box.style.height = `${Math.min(box.scrollHeight + 2, 240)}px`;
  }, [draft]);
  useEffect(() => { field.current.focus({ preventScroll: true }); }, []);
  const add = async (list) => {
    for (const file of [...list].filter((one) => one.type.startsWith("image/"))) {
      if (file.size > MOST_IMAGE_BYTES) { toast(`${file.name} is larger than 8 MB.`, { kind: "failed" }); continue; }
      const url = await new Promise((resolve) => { const reader = new FileReader(); reader.onload = () => resolve(reader.result); reader.readAsDataURL(file); });
      setImages((all) => (all.length < MOST_IMAGES ? [...all, { name: file.name || "image", url }] : all));
    }
  };
  const onPaste = (event) => { if (sees && event.clipboardData.files.length) { event.preventDefault(); add(event.clipboardData.files); } };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
    else if (event.key === "Escape" && busy) stop();
  };
  return html`<form class="composer card" onSubmit=${(event) => { event.preventDefault(); submit(); }}
      onDragOver=${(event) => { if (sees) event.preventDefault(); }} onDrop=${(event) => { if (sees) { event.preventDefault(); add(event.dataTransfer.files); } }}>
    ${images.length > 0 && html`<div class="thumbs">${images.map((image, index) => html`<span class="thumb"><img src=${image.url} alt=${image.name} />
      <button type="button" class="plain" aria-label=${`Remove ${image.name}`} onClick=${() => setImages(images.filter((_, at) => at !== index))}>✕</button></span>`)}</div>`}
    ${images.length > 0 && !sees && html`<p class="callout notice flush">The chosen model reads text only, so the images are not sent.</p>`}
    <label class="unseen" for="prompt">Message</label>
    <textarea id="prompt" ref=${field} rows="1" dir="auto" placeholder="Message" value=${draft} onInput=${(event) => setDraft(event.target.value)} onKeyDown=${onKeyDown} onPaste=${onPaste}></textarea>
    <div class="composer-foot">
      ${sees && html`<input ref=${files} type="file" accept="image/*" multiple hidden onChange=${(event) => { add(event.target.files); event.target.value = ""; }} />
        <button type="button" class="button" onClick=${() => files.current.click()}>Add image</button>`}
      <span class="small soft">${problem ? "Correct the parameters first." : "Enter sends, Shift+Enter begins a line, Escape stops"}</span>
      ${busy ? html`<button type="button" class="button danger" onClick=${stop}>Stop</button>` : html`<button class="button primary" disabled=${Boolean(problem) || !(draft.trim() || images.length)}>Send</button>`}</div></form>`;
}

function Sample({ body, onClose }) {
  const [kind, setKind] = useState("curl");
  const needsKey = session.get()?.require_auth;
  const text = kind === "curl" ? asCurl(body, location.origin, needsKey) : asPython(body, location.origin, needsKey);
  return html`<${Dialog} title="This request as code" onClose=${onClose} wide><div class="body">
    <div class="segments" role="group" aria-label="Language">${["curl", "Python"].map((one) => html`<button type="button" aria-pressed=${kind === one} onClick=${() => setKind(one)}>${one}</button>`)}</div>
    <${Code} text=${text} title=${kind} />
    ${needsKey && html`<p class="soft small">Set the environment variable HELEXA_API_KEY to your key. The key of this session is not shown.</p>`}</div></${Dialog}>`;
}
