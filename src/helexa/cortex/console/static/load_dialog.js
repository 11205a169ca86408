// The dialog that loads a model: one of the catalog, one of the nodes' disks, or one that it downloads first by its name.

import { get, post } from "./api.js";
import { Decision, Gone, Verdicts, explain, useAction, useNode } from "./dialog_parts.js";
import { html, memory, useEffect, useMemo, useRef, useState } from "./lib.js";
import { Badge, Failed, Loading, ModelName, Notice, toast, useLoad } from "./ui.js";

const MOST_CHOICES = 50; // longer lists ask for a filter
const POLL_MS = 1000;
const SOURCE = /^[^/]+\/.+|^[a-z]+:.+/; // organization/name or scheme:name; other texts only filter the list
const KINDS = { warm: "good", loading: "wait", recovering: "warned", sleeping: "idle", unreachable: "failed" };

// All models that can be loaded, by id: {id, state, disks}. `disks` are the copies on nodes, with their size and memory.
function choicesOf(models, nodes) {
  const named = models.filter((model) => !model.alias_of);
  const choices = new Map(named.map((model) => [model.id, { id: model.id, state: model.state, disks: [] }]));
  for (const node of nodes)
    for (const model of node.models) {
      const known = [model.id, ...(model.names ?? [])].find((name) => choices.has(name)) ?? model.id;
      if (!choices.has(known)) choices.set(known, { id: known, state: "cold", disks: [] });
      choices.get(known).disks.push({ ...model, node: node.name });
    }
  return [...choices.values()].sort((a, b) => b.disks.length - a.disks.length || a.id.localeCompare(b.id));
}

export function LoadModel({ name, model, onClose }) {
  const [text, setText] = useState(model ?? "");
  const [chosen, setChosen] = useState(model ?? "");
  const [node, setNode] = useState(name ?? "");
  const models = useLoad(() => get("/v1/models"), []);
  const local = useLoad(() => get("/api/models/local"), []);
  const nodes = local.data?.nodes ?? [];
  const choices = useMemo(() => choicesOf(models.data?.data ?? [], nodes), [models.data, local.data]);
  const exists = useNode(node);
  const typed = text.trim();
  const isNamed = (one) => one.id === typed || one.disks.some((disk) => disk.names?.includes(typed));
  const id = chosen || (choices.find(isNamed)?.id ?? ""); // the typed name may be in a list that arrives later
  const known = choices.some((one) => one.id === id);
  const plan = useLoad(async () => (id ? explain(id, { for_load: true, ...(node ? { node } : {}) }) : null), [id, node]);
  const overview = useLoad(async () => (id ? explain(id, { for_load: true }) : null), [id]);
  const [state, start] = useAction(async () => {
    const request = post("/api/models/load", { model: id, node: node || null });
    request.then(
      (result) => toast(`${result.model} is loaded on ${result.node}.`),
      (error) => toast(`${id} was not loaded. ${error.message}`, { kind: "failed" }),
    );
    // Errors that are known at once stay in the dialog; the fleet view shows the progress of a load.
    await Promise.race([request, new Promise((resolve) => setTimeout(resolve, 600))]);
  }, onClose);
  const type = (value) => {
    setText(value);
    setChosen("");
  };
  const reload = () => {
    models.reload();
    local.reload();
  };
  const words = typed.toLowerCase();
  const matching = choices.filter((one) => one.id === id || one.id.toLowerCase().includes(words));
  const chosenIsWarm = plan.data?.decision === "warm";
  const ready = models.data && (local.data || local.error);
  return html`<form class="body form" onSubmit=${(event) => {
    event.preventDefault();
    start();
  }}>
    <label class="wide-field">Model <input value=${text} placeholder="filter, or a name to download: organization/name" spellcheck=${false} autocomplete="off" dir="auto" onInput=${(event) => type(event.target.value)} /></label>
    ${models.error && html`<${Failed} error=${models.error} retry=${models.reload} />`}
    ${
      ready
        ? html`<${Choices} list=${matching} id=${id} choose=${setChosen} />
        ${!matching.length && html`<p class="soft small">No model of the catalog or of the nodes' disks has this name.</p>`}`
        : !models.error && html`<${Loading} rows=${3} label="Loading the models" />`
    }
    ${nodes.flatMap((one) => one.problems.map((problem) => html`<${Notice} key=${`${one.name} ${problem}`} title=${`${one.name}:`}>${problem}</${Notice}>`))}
    ${ready && html`<${Downloads} source=${id || (matching.length && !SOURCE.test(words)) ? "" : typed} node=${node} nodes=${nodes} onDone=${reload} />`}
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
      <button class="button primary" disabled=${state.busy || !known || chosenIsWarm}>${state.busy ? "Starting…" : "Load"}</button></div></form>`;
}

function Choices({ list, id, choose }) {
  const shown = list.slice(0, MOST_CHOICES);
  if (!shown.length) return null;
  return html`<fieldset class="models-choice"><legend>Models of the catalog and of the nodes' disks</legend>${shown.map((one) => {
    const problem = one.disks.length && one.disks.every((disk) => disk.problem) ? one.disks[0].problem : "";
    return html`<label key=${one.id} class="check"><input type="radio" name="model" checked=${one.id === id} onChange=${() => choose(one.id)} />
      <span><${ModelName} id=${one.id} /> <span class="soft small" dir="auto">${diskWords(one.disks)}</span>${problem && html` <span class="worse small" dir="auto">${problem}</span>`}</span>
      ${one.state !== "cold" && html`<${Badge} kind=${KINDS[one.state]}>${one.state}</${Badge}>`}</label>`;
  })}${list.length > MOST_CHOICES && html`<p class="soft small">and ${list.length - MOST_CHOICES} more: filter by name.</p>`}</fieldset>`;
}

// The size of files has decimal units, as in `helexa list` and at model hubs; memory has binary ones.
const fileSize = (bytes) => (bytes < 1e9 ? `${Math.round(bytes / 1e6)} MB` : `${(bytes / 1e9).toFixed(1)} GB`);

// Where the files of a model are, their size, and the memory that the model needs.
function diskWords(disks) {
  if (!disks.length) return "";
  const [{ form, size_bytes: bytes, memory_mb: needed }] = disks;
  const names = disks.map((disk) => disk.node);
  const places = names.length > 3 ? `${names.slice(0, 3).join(", ")} and ${names.length - 3} more` : names.join(", ");
  return [`on the disk of ${places}`, form, bytes && `${fileSize(bytes)} of files`, needed && `needs ${memory(needed)} of memory`]
    .filter(Boolean)
    .join(" · ");
}

// The running downloads of all nodes, those that ended while the dialog was open, and the button that downloads `source`.
function Downloads({ source, node, nodes, onDone }) {
  const [pulls, setPulls] = useState([]);
  const [error, setError] = useState(null);
  const [target, setTarget] = useState("");
  const open = useRef(true),
    following = useRef(false);
  const seen = useRef(new Set()); // downloads that were seen running
  const places = nodes.filter((one) => one.downloads && one.healthy).map((one) => one.name);
  const poll = async () => {
    try {
      const found = (await get("/api/models/pulls")).pulls;
      if (!open.current) return false;
      const keyOf = (pull) => `${pull.node} ${pull.model}`;
      for (const pull of found) {
        if (pull.status === "running") seen.current.add(keyOf(pull));
        else if (pull.status === "done" && seen.current.delete(keyOf(pull))) {
          toast(`${pull.model} is downloaded to ${pull.node}.`);
          onDone();
        }
      }
      setPulls(found.filter((pull) => pull.status === "running" || (pull.status !== "done" && seen.current.has(keyOf(pull)))));
      return found.some((pull) => pull.status === "running");
    } catch (problem) {
      setError(problem);
      return false;
    }
  };
  const follow = async () => {
    if (following.current) return;
    following.current = true;
    while (await poll()) await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    following.current = false;
  };
  useEffect(() => {
    follow();
    return () => {
      open.current = false;
    };
  }, []);
  const act = async (path, body) => {
    setError(null);
    try {
      const pull = await post(path, body);
      seen.current.add(`${pull.node} ${pull.model}`);
      follow();
    } catch (problem) {
      setError(problem);
    }
  };
  const chosen = places.includes(target) ? target : places.includes(node) ? node : places[0];
  const isRunning = pulls.some((pull) => pull.model === source && pull.status === "running");
  return html`${pulls.map((pull) => html`<${Download} key=${`${pull.node} ${pull.model}`} pull=${pull} cancel=${() => act("/api/models/pull/cancel", { model: pull.model, node: pull.node })} />`)}
    ${
      source &&
      !isRunning &&
      (places.length
        ? html`<div class="actions download"><button type="button" class="button" onClick=${() => act("/api/models/pull", { model: source, node: chosen })}>Download <bdi>${source}</bdi></button>
          ${places.length > 1 && html`<label class="check">to <select value=${chosen} onChange=${(event) => setTarget(event.target.value)}>${places.map((one) => html`<option key=${one} value=${one}>${one}</option>`)}</select></label>`}</div>`
        : html`<p class="soft small">No node downloads models on request. <code>on_request</code> in <code>[downloads]</code> of a node's neuron.toml allows it.</p>`)
    }
    ${error && html`<${Notice} kind="failed" title="The download did not work.">${error.message}</${Notice}>`}`;
}

function Download({ pull, cancel }) {
  const fraction = pull.total ? pull.done / pull.total : undefined;
  if (pull.status !== "running")
    return html`<${Notice} kind=${pull.status === "failed" ? "failed" : "notice"} title=${`The download of ${pull.model} to ${pull.node} ${pull.status === "failed" ? "failed." : "is canceled."}`}>${pull.error ?? "A later download goes on where it stopped."}</${Notice}>`;
  return html`<div class="download"><span><${ModelName} id=${pull.model} /> <span class="soft small">${pull.stage ?? "starting"}${pull.total ? `: ${fileSize(pull.done)} of ${fileSize(pull.total)}` : ""}, to ${pull.node}</span></span>
    <progress max="1" value=${fraction} aria-label=${`Downloading ${pull.model}`}></progress><button type="button" class="button small" onClick=${cancel}>Cancel download</button></div>`;
}
