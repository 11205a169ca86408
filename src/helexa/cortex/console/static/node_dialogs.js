// Dialogs of administrators: each says what will happen, by the gateway's own dry run, before it acts.

import { get, post, send } from "./api.js";
import { Buttons, Decision, Gone, Verdicts, encode, explain, useAction, useNode } from "./dialog_parts.js";
import { html, plural, useRef } from "./lib.js";
import { loadedOn, modelsOf, runningOf } from "./fleet_model.js";
import { LoadModel } from "./load_dialog.js";
import { Dialog, Failed, Loading, ModelName, Notice, toast, useLoad } from "./ui.js";

const TITLES = {
  load: "Load a model",
  unload: "Unload a model",
  "unload-all": "Unload all models",
  drain: "Drain a node",
  cordon: "Cordon a node",
  uncordon: "Uncordon a node",
  explain: "Where would a request go?",
};

export function NodeDialog({ action, node, model, onClose }) {
  const Content = { load: LoadModel, unload: UnloadModel, "unload-all": UnloadAll, explain: Explain }[action] ?? ChangeNode;
  return html`<${Dialog} title=${TITLES[action]} onClose=${onClose} wide=${action === "load" || action === "explain"}>
    <${Content} action=${action} name=${node} model=${model} onClose=${onClose} /></${Dialog}>`;
}

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

function UnloadAll({ name, onClose }) {
  const node = useNode(name);
  const models = node ? loadedOn(node).map((row) => row.id) : [];
  const [state, start] = useAction(async () => {
    const requests = models.map((model) => post("/api/models/unload", { model, node: name }));
    const all = Promise.allSettled(requests).then((outcomes) => {
      const failed = outcomes.filter((outcome) => outcome.status === "rejected");
      const done = outcomes.length - failed.length;
      if (done) toast(`${plural(done, "model")} unloaded from ${name}.`);
      if (failed.length) toast(`${plural(failed.length, "model")} not unloaded: ${failed[0].reason.message}`, { kind: "failed" });
    });
    await Promise.race([all, new Promise((resolve) => setTimeout(resolve, 400))]);
  }, onClose);
  if (!node) return html`<div class="body"><${Gone} name=${name} /></div>`;
  const running = runningOf(node);
  return html`<div class="body">
    <p>${models.length ? `${plural(models.length, "model leaves", "models leave")} the memory of ` : "No model is loaded on "}<strong>${name}</strong>. ${running ? `${plural(running, "running request")} can finish first, for five minutes at most.` : "No request runs on it."} A new request loads its model again, if the catalog has the model.</p>
    <ul class="consequences">${models.slice(0, 12).map((id) => html`<li key=${id}><${ModelName} id=${id} /></li>`)}${models.length > 12 && html`<li class="soft">and ${models.length - 12} more</li>`}</ul>
    ${state.error && html`<${Notice} kind="failed" title="It did not work.">${state.error.message}</${Notice}>`}
    <${Buttons} label="Unload all" danger busy=${state.busy} disabled=${!models.length} run=${start} onClose=${onClose} /></div>`;
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
