// Dialogs of administrators: each says what will happen, by the gateway's own dry run, before it acts.

import { get, post, send } from "./api.js";
import { html, plural, useMemo, useRef, useState, useStore } from "./lib.js";
import { live } from "./live.js";
import { modelsOf, runningOf } from "./fleet_model.js";
import { Badge, Dialog, Failed, Loading, ModelName, Notice, toast, useLoad } from "./ui.js";

const TITLES = {
  load: "Load a model",
  unload: "Unload a model",
  drain: "Drain a node",
  cordon: "Cordon a node",
  uncordon: "Uncordon a node",
  explain: "Where would a request go?",
};

export function NodeDialog({ action, node, model, onClose }) {
  const Content = { load: LoadModel, unload: UnloadModel, explain: Explain }[action] ?? ChangeNode;
  return html`<${Dialog} title=${TITLES[action]} onClose=${onClose} wide=${action === "load" || action === "explain"}>
    <${Content} action=${action} name=${node} model=${model} onClose=${onClose} /></${Dialog}>`;
}

const useNode = (name) => useStore(live, (state) => state.nodes?.find((node) => node.name === name));
const encode = (text) => text.split("/").map(encodeURIComponent).join("/");
const explain = (model, extra = {}) => get(`/api/explain?${new URLSearchParams({ model, ...extra })}`);

// Run an action and close the dialog. A failure stays in the dialog, with its reason.
function useAction(run, onClose) {
  const [state, setState] = useState({ busy: false, error: null });
  const start = async (...args) => {
    setState({ busy: true, error: null });
    try {
      await run(...args);
      onClose();
    } catch (error) {
      setState({ busy: false, error });
    }
  };
  return [state, start];
}

function Buttons({ label, busy, danger, disabled, run, onClose }) {
  return html`<div class="actions end"><button type="button" class="button" onClick=${onClose}>Cancel</button>
    <button type="button" class=${`button ${danger ? "danger" : "primary"}`} disabled=${busy || disabled} onClick=${run}>${busy ? "Working…" : label}</button></div>`;
}

const Gone = ({ name }) =>
  html`<${Notice} kind="failed" title=${`${name} is not in the configuration any more.`}>Nothing can be done with it. Close this dialog.</${Notice}>`;

// What happens to the models of a node when the node gets no more requests.
function Consequences({ node }) {
  const warm = node.healthy
    ? modelsOf(node)
        .filter((row) => row.kind === "good")
        .slice(0, 12)
    : [];
  const ids = warm.map((row) => row.id).join("\n");
  const { data, error } = useLoad(() => Promise.all(warm.map((row) => explain(row.id, { without: node.name }))), [ids]);
  if (!warm.length) return html`<p>No model is warm on this node.</p>`;
  if (error) return html`<p class="soft">What happens to its models cannot be determined: ${error.message}</p>`;
  if (!data) return html`<${Loading} rows=${2} />`;
  return html`<ul class="consequences">${data.map((one) => html`<li key=${one.model}><${ModelName} id=${one.model} /> <span dir="auto">${where(one)}</span></li>`)}</ul>`;
}

function where(explanation) {
  if (explanation.decision === "warm") return `stays warm on ${explanation.node}.`;
  if (explanation.decision === "load")
    return `would be loaded on ${explanation.node} by the next request: it ${explanation.reason}.`;
  if (explanation.decision === "wait") return `would wait for ${explanation.node}: it ${explanation.reason}.`;
  return `cannot be served elsewhere: ${explanation.reason}.`;
}

function ChangeNode({ action, name, onClose }) {
  const node = useNode(name);
  const known = useRef(node?.cordoned);
  const [state, start] = useAction(async () => {
    if (action === "drain") {
      await send(`/api/nodes/${encode(name)}/cordon`, { method: "POST" });
      toast(`${name} is draining: it gets no new requests.`);
      // The fleet view shows the progress; this request only tells when the node is empty.
      send(`/api/nodes/${encode(name)}/drain?wait_secs=600`, { method: "POST" })
        .then((response) => response.json())
        .then(
          (result) =>
            toast(
              result.in_flight + result.loading === 0
                ? `${name} is empty and can be stopped.`
                : `${name} still has ${plural(result.in_flight, "running request")}.`,
            ),
          (error) => toast(`${name}: ${error.message}`, { kind: "failed" }),
        );
    } else {
      await send(`/api/nodes/${encode(name)}/${action}`, { method: "POST" });
      toast(`${name} is ${action === "cordon" ? "cordoned" : "in service again"}.`);
    }
  }, onClose);
  if (!node) return html`<div class="body"><${Gone} name=${name} /></div>`;
  const running = runningOf(node),
    changed = known.current !== node.cordoned;
  const done = action === "uncordon" ? !node.cordoned : action === "cordon" && node.cordoned;
  return html`<div class="body">
    ${changed && html`<${Notice} title="The node has changed meanwhile.">Somebody else has ${node.cordoned ? "cordoned" : "uncordoned"} ${name}.</${Notice}>`}
    ${
      action === "uncordon"
        ? html`<p><strong>${name}</strong> gets requests and loads again.</p>`
        : html`<p><strong>${name}</strong> gets no new requests and no new loads. ${running ? `${plural(running, "running request")} can finish.` : "Nothing runs on it now."}
          ${action === "drain" && " A message says when the node is empty and can be stopped."}</p>
        <h3>What happens to its models</h3><${Consequences} node=${node} />`
    }
    ${done && html`<p class="soft">There is nothing to do.</p>`}
    ${state.error && html`<${Notice} kind="failed" title="It did not work.">${state.error.message}</${Notice}>`}
    <${Buttons} label=${{ drain: "Drain", cordon: "Cordon", uncordon: "Uncordon" }[action]} busy=${state.busy} disabled=${done} run=${start} onClose=${onClose} /></div>`;
}

// What happens to requests for a model after it was unloaded from a node, in words.
async function afterUnload(model, node) {
  const elsewhere = await explain(model, { without: node });
  if (elsewhere.decision === "warm") return `The model stays warm on ${elsewhere.node}, which gets new requests.`;
  const entry = await get(`/v1/models/${encodeURIComponent(model)}`);
  if (entry.feasible_on.length) return "A new request for the model loads it again.";
  return "The model is not in the catalog, so the gateway cannot load it again: new requests for it fail.";
}

function UnloadModel({ name, model, onClose }) {
  const node = useNode(name);
  const row = node && modelsOf(node).find((one) => one.id === model);
  const { data, error } = useLoad(() => afterUnload(model, name), [model, name]);
  const [state, start] = useAction(async () => {
    const request = post("/api/models/unload", { model, node: name });
    request.then(
      () => toast(`${model} is unloaded from ${name}.`),
      (error) => toast(`${model} was not unloaded: ${error.message}`, { kind: "failed" }),
    );
    await Promise.race([request, new Promise((resolve) => setTimeout(resolve, 400))]);
  }, onClose);
  if (!node) return html`<div class="body"><${Gone} name=${name} /></div>`;
  const running = row ? Math.max(row.running, row.load?.in_flight ?? 0) : 0;
  const unloading = row?.word === "unloading",
    gone = !row || row.word === "cold";
  return html`<div class="body">
    ${unloading && html`<${Notice} title="The node has changed meanwhile.">The model is already being unloaded.</${Notice}>`}
    ${gone && html`<${Notice} title="The node has changed meanwhile.">${name} does not have the model loaded any more.</${Notice}>`}
    <p><${ModelName} id=${model} /> leaves the memory of <strong>${name}</strong>. ${running ? `${plural(running, "running request")} can finish first, for five minutes at most.` : "No request runs on it."}</p>
    ${data ? html`<p dir="auto">${data}</p>` : error ? html`<p class="soft">What happens to new requests cannot be determined: ${error.message}</p>` : html`<${Loading} rows=${1} />`}
    ${state.error && html`<${Notice} kind="failed" title="It did not work.">${state.error.message}</${Notice}>`}
    <${Buttons} label="Unload" danger busy=${state.busy} disabled=${unloading || gone} run=${start} onClose=${onClose} /></div>`;
}

function Verdicts({ data, chosen, picked, choose }) {
  return html`<div class="scroll" tabindex="0" role="group" aria-label="Nodes"><table><thead><tr><th scope="col">Node</th><th scope="col">What it could do</th></tr></thead>
    <tbody>${data.candidates.map(
      (one) => html`<tr key=${one.node} class=${one.node === chosen ? "chosen" : ""}><th scope="row">${
        choose
          ? html`<label class="check"><input type="radio" name="node" checked=${one.node === picked} onChange=${() => choose(one.node)} /> ${one.node}</label>`
          : one.node
      }</th>
      <td class="wrap" dir="auto">${one.verdict}</td></tr>`,
    )}</tbody></table></div>`;
}

const DECISIONS = { warm: "good", load: "wait", wait: "warned", refuse: "failed" };
const DECISION_WORDS = { warm: "warm", load: "would load", wait: "would wait", refuse: "rejected" };

function Decision({ data }) {
  return html`<p><${Badge} kind=${DECISIONS[data.decision]}>${DECISION_WORDS[data.decision]}</${Badge}> ${data.node && html`<strong>${data.node}</strong>: `}<span dir="auto">${data.decision === "load" || data.decision === "wait" ? `it ${data.reason}` : data.reason}</span></p>
    ${data.evict.length > 0 && html`<${Notice} title="Other models leave the memory:">${data.evict.join(", ")}</${Notice}>`}`;
}

function Explain({ model, onClose }) {
  const { data, error, reload } = useLoad(() => explain(model), [model]);
  return html`<div class="body"><p>A request for <${ModelName} id=${model} /> that arrives now:</p>
    ${
      error
        ? html`<${Failed} error=${error} retry=${reload} />`
        : !data
          ? html`<${Loading} rows=${3} />`
          : html`<${Decision} data=${data} /><${Verdicts} data=${data} chosen=${data.node} />`
    }
    <div class="actions end"><button type="button" class="button" onClick=${onClose}>Close</button></div></div>`;
}

function LoadModel({ name, model, onClose }) {
  const [id, setId] = useState(model ?? "");
  const [node, setNode] = useState(name ?? "");
  const models = useLoad(() => get("/v1/models"), []);
  const catalogue = useMemo(() => (models.data?.data ?? []).map((one) => one.id), [models.data]);
  const known = catalogue.includes(id) || id === model;
  const plan = useLoad(async () => (known && id ? explain(id, node ? { node } : {}) : null), [id, node, known]);
  const overview = useLoad(async () => (known && id ? explain(id) : null), [id, known]);
  const exists = useNode(node);
  const [state, start] = useAction(async () => {
    const request = post("/api/models/load", { model: id, node: node || null });
    request.then(
      (result) => toast(`${result.model} is loaded on ${result.node}.`),
      (error) => toast(`${id} was not loaded. ${error.message}`, { kind: "failed" }),
    );
    // Errors that are known at once stay in the dialog; the fleet view shows the progress of a load.
    await Promise.race([request, new Promise((resolve) => setTimeout(resolve, 600))]);
  }, onClose);
  const chosenIsWarm = plan.data?.decision === "warm";
  return html`<form class="body form" onSubmit=${(event) => {
    event.preventDefault();
    start();
  }}>
    <label class="wide-field">Model <input list="catalogue" value=${id} required spellcheck=${false} autocomplete="off" dir="auto" onInput=${(event) => setId(event.target.value)} /></label>
    <datalist id="catalogue">${catalogue.map((one) => html`<option key=${one} value=${one} />`)}</datalist>
    ${models.error && html`<p class="soft small">The list of models could not be loaded: ${models.error.message}</p>`}
    ${id && !known && models.data && html`<p class="soft small">No model of the catalog has this name. Choose one of the list.</p>`}
    ${node && !exists && html`<${Gone} name=${node} />`}
    ${plan.data && html`<${Decision} data=${plan.data} />`}
    ${plan.error && html`<${Notice} kind="failed" title="The dry run failed.">${plan.error.message}</${Notice}>`}
    ${
      overview.data &&
      html`<fieldset><legend>On which node</legend>
      <label class="check"><input type="radio" name="node" checked=${!node} onChange=${() => setNode("")} /> let the gateway choose</label>
      <${Verdicts} data=${overview.data} chosen=${node || plan.data?.node} picked=${node} choose=${setNode} /></fieldset>`
    }
    ${chosenIsWarm && html`<p class="soft">The model is already loaded${node ? " there" : ""}; there is nothing to do.</p>`}
    ${state.error && html`<${Notice} kind="failed" title="It did not work.">${state.error.message}</${Notice}>`}
    <div class="actions end"><button type="button" class="button" onClick=${onClose}>Cancel</button>
      <button class="button primary" disabled=${state.busy || !known || !id || chosenIsWarm}>${state.busy ? "Starting…" : "Load"}</button></div></form>`;
}
