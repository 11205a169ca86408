// The parameters of the playground's requests, and presets of them: those of the console, and the user's own.

import { readPresets, writePresets } from "./chat_store.js";
import { html, useState } from "./lib.js";
import { Dialog, toast } from "./ui.js";

export const NO_PARAMETERS = {
  system: "",
  temperature: "",
  top_p: "",
  max_tokens: "",
  seed: "",
  stop: "",
  thinking: "",
  tools: "",
};

const preset = (name, parameters) => ({ name, parameters: { ...NO_PARAMETERS, ...parameters } });
const BUILT_IN = [
  preset("Model's defaults", {}),
  preset("Short and exact", {
    system: "Answer briefly and exactly. If you are not sure, say so.",
    temperature: "0.2",
  }),
  preset("Programming", {
    system: "You are an experienced software engineer. Answer with complete, working code first, then explain it briefly.",
    temperature: "0.2",
  }),
  preset("Writing", {
    system: "You are a writer with a clear and vivid style. Vary the sentences and avoid stock phrases.",
    temperature: "1",
    top_p: "0.95",
  }),
  preset("Translate to English", {
    system: "Translate each message into English. Answer with the translation only.",
    temperature: "0",
  }),
  preset("Summarize", {
    system: "Summarize each message in at most five bullet points. Use only what the message says.",
    temperature: "0.3",
  }),
];

const isSame = (one, other) => Object.keys(NO_PARAMETERS).every((name) => one[name] === other[name]);

export function Parameters({ account, value, set, problem, reasons }) {
  const [own, setOwn] = useState(() => readPresets(account));
  const [naming, setNaming] = useState(false);
  const field = (name) => ({
    id: `p-${name}`,
    value: value[name],
    onInput: (event) => set({ ...value, [name]: event.target.value }),
  });
  const ownChosen = own.find((one) => isSame(one.parameters, value));
  const chosen = ownChosen ?? BUILT_IN.find((one) => isSame(one.parameters, value));
  const store = (presets) => {
    const failure = writePresets(account, presets);
    if (failure) toast(failure, { kind: "failed" });
    else setOwn(presets);
    return !failure;
  };
  const choose = (event) => {
    const found = [...own, ...BUILT_IN].find((one) => one.name === event.target.value);
    if (found) set({ ...NO_PARAMETERS, ...found.parameters });
  };
  const options = (presets) => presets.map((one) => html`<option key=${one.name} value=${one.name}>${one.name}</option>`);
  return html`<div class="form">
    <div class="full field"><label for="p-preset">Preset</label><select id="p-preset" value=${chosen?.name ?? ""} onChange=${choose}>
      ${!chosen && html`<option value="">own settings</option>`}
      ${own.length > 0 && html`<optgroup label="Saved in this browser">${options(own)}</optgroup>`}
      <optgroup label="Built in">${options(BUILT_IN.filter((one) => !own.some((mine) => mine.name === one.name)))}</optgroup></select></div>
    <div class="actions full">
      <button type="button" class="button small" disabled=${Boolean(chosen)} onClick=${() => setNaming(true)}>Save as preset…</button>
      ${ownChosen && html`<button type="button" class="button small danger" onClick=${() => store(own.filter((one) => one !== ownChosen))}>Delete preset</button>`}
      <button type="button" class="button small" disabled=${isSame(value, NO_PARAMETERS)} onClick=${() => set(NO_PARAMETERS)}>Reset</button></div>
    <label class="full">System prompt <textarea rows="4" dir="auto" ...${field("system")}></textarea></label>
    <label>Temperature <input inputmode="decimal" placeholder="model's default" ...${field("temperature")} /></label>
    <label>Top p <input inputmode="decimal" placeholder="model's default" ...${field("top_p")} /></label>
    <label>Maximum tokens <input inputmode="numeric" placeholder="free context" ...${field("max_tokens")} /></label>
    <label>Seed <input inputmode="numeric" placeholder="random" ...${field("seed")} /></label>
    <label class="full">Reasoning <select ...${field("thinking")}><option value="">default</option><option value="on">on</option><option value="off">off</option></select></label>
    ${value.thinking && !reasons && html`<p class="soft small full">The chosen model has no switch for reasoning.</p>`}
    <label class="full">Stop strings, one per line <textarea rows="1" ...${field("stop")}></textarea></label>
    <label class="full">Tools, a JSON list of functions <textarea rows="3" class="mono" spellcheck=${false} placeholder='[{"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]' ...${field("tools")}></textarea></label>
    ${problem && html`<p class="callout failed full" role="alert">${problem}</p>`}
    ${naming && html`<${NamePreset} onClose=${() => setNaming(false)} save=${(name) => store([...own.filter((one) => one.name !== name), { name, parameters: value }])} />`}</div>`;
}

function NamePreset({ save, onClose }) {
  const [name, setName] = useState("");
  return html`<${Dialog} title="Save as preset" onClose=${onClose}><form class="body form" onSubmit=${(event) => {
    event.preventDefault();
    if (save(name.trim())) onClose();
  }}><label>Name of the preset <input autofocus required pattern=".*\\S.*" maxlength="60" value=${name} onInput=${(event) => setName(event.target.value)} /></label>
    <p class="soft small">A preset has the system prompt and all parameters. A preset with the same name is replaced.</p>
    <div class="actions"><button class="button primary">Save</button></div></form></${Dialog}>`;
}
