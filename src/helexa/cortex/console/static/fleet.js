// The fleet: nodes with their memory and models, and what administrators can do with them.

import { requireAdmin, seesFleet, session } from "./api.js";
import { NodeDialog } from "./node_dialogs.js";
import {
  context,
  count,
  duration,
  html,
  memo,
  memory,
  plural,
  rate,
  useEffect,
  useMemo,
  useState,
  useStore,
} from "./lib.js";
import { live } from "./live.js";
import { hardware, hitRate, memoryOf, modelsOf, nodeState, problems, runningOf, sums } from "./fleet_model.js";
import { Badge, Bar, Empty, Figures, Loading, Menu, ModelName, Notice } from "./ui.js";

const EXPANDED_NODES = 8; // longer lists begin with closed nodes
const MOST_PLACES = 8; // nodes that are named per model
const SLICE = 10; // nodes that are added in one frame

export default function Fleet() {
  const value = useStore(session);
  return seesFleet(value) ? html`<${Nodes} />` : html`<${ModelsOfUser} />`;
}

function Nodes() {
  const nodes = useStore(live, (state) => state.nodes);
  const [filter, setFilter] = useState("");
  const [view, setView] = useState("nodes");
  const [dialog, setDialog] = useState(null);
  const [open, setOpen] = useState({});
  const [shown, setShown] = useState(SLICE);
  const total = nodes?.length ?? 0;
  useEffect(() => {
    if (shown >= total) return undefined;
    const frame = requestAnimationFrame(() => setShown((value) => value + SLICE));
    return () => cancelAnimationFrame(frame);
  }, [shown, total]);
  const act = useMemo(
    () => ({
      open: (name, is) => setOpen((old) => ({ ...old, [name]: is })),
      dialog: (action, node, model) => {
        if (requireAdmin(ACTION_WORDS[action])) setDialog({ action, node, model });
      },
    }),
    [],
  );
  if (!nodes) return html`<${Loading} rows=${6} label="Loading the fleet" />`;
  const words = filter.trim().toLowerCase();
  const matches = (node) =>
    !words ||
    `${node.name} ${nodeState(node).word} ${hardware(node)}`.toLowerCase().includes(words) ||
    node.models.some((info) => info.id.toLowerCase().includes(words));
  const visible = nodes.filter(matches);
  const all = sums(nodes),
    trouble = problems(nodes);
  return html`
    <div class="title"><h1>Fleet</h1>
      <div class="tools">
        <label class="unseen" for="fleet-filter">Filter nodes and models</label>
        <input id="fleet-filter" type="search" placeholder="Filter  /" value=${filter} onInput=${(event) => setFilter(event.target.value)} />
        <div class="segments" role="group" aria-label="Show">
          ${["nodes", "models"].map((name) => html`<button type="button" aria-pressed=${view === name} onClick=${() => setView(name)}>${name === "nodes" ? "Nodes" : "Models"}</button>`)}
        </div>
        <button type="button" class="button" onClick=${() => act.dialog("load")}>Load model…</button>
      </div></div>
    <${Figures} items=${[
      { label: "Nodes up", value: `${all.up} of ${nodes.length}`, kind: all.up < nodes.length ? "warned" : "" },
      { label: "Models warm", value: count(all.warm), unit: all.loading ? `+ ${all.loading} loading` : "" },
      { label: "Running", value: count(all.running), unit: "requests" },
      { label: "Queued", value: count(all.queued), unit: "requests", kind: all.queued ? "warned" : "" },
      { label: "Decode", value: rate(all.decode), unit: "tok/s" },
      {
        label: "Prefix hits",
        value: all.prompt ? `${Math.round((all.cached / all.prompt) * 100)}` : "–",
        unit: all.prompt ? "%" : "",
      },
      {
        label: "Memory",
        value: all.total ? count(all.used / 1024) : "–",
        unit: all.total ? `of ${count(all.total / 1024)} GB` : "",
      },
    ]} />
    <${Problems} list=${trouble} act=${act} />
    ${
      nodes.length === 0
        ? html`<section class="card"><${Empty} title="No nodes yet">Add a [[neurons]] table with the node's name and endpoint to cortex.toml. The gateway reads the file when it changes.</${Empty}></section>`
        : view === "nodes"
          ? visible.length
            ? html`<div class="nodes">${visible.slice(0, shown).map(
                (node) => html`<${NodeCard} key=${node.name} node=${node} act=${act}
          open=${open[node.name] ?? visible.length <= EXPANDED_NODES} />`,
              )}</div>`
            : html`<section class="card"><${Empty} title="Nothing matches" action=${html`<button type="button" class="button" onClick=${() => setFilter("")}>Clear the filter</button>`}>No node or model contains “${filter}”.</${Empty}></section>`
          : html`<${ModelTable} nodes=${nodes} words=${words} act=${act} />`
    }
    ${dialog && html`<${NodeDialog} ...${dialog} onClose=${() => setDialog(null)} />`}`;
}

const ACTION_WORDS = {
  load: "Loading a model",
  unload: "Unloading a model",
  drain: "Draining a node",
  cordon: "Cordoning a node",
  uncordon: "Uncordoning a node",
};

function Problems({ list, act }) {
  const [all, setAll] = useState(false);
  const visible = all ? list : list.slice(0, 3);
  if (!list.length) return null;
  return html`<div class="callouts" aria-label="What needs attention">${visible.map(
    (one) => html`<${Notice} key=${one.key} kind=${one.kind === "failed" ? "failed" : "notice"} title=${one.title}
    action=${one.retry && html`<button type="button" class="button small" onClick=${() => act.dialog("load", one.node, one.model)}>Try again…</button>`}>${one.text}</${Notice}>`,
  )}
    ${list.length > 3 && html`<button type="button" class="plain" onClick=${() => setAll(!all)}>${all ? "Show fewer" : `Show ${list.length - 3} more`}</button>`}</div>`;
}

const NodeCard = memo(function NodeCard({ node, open, act }) {
  const state = nodeState(node),
    rows = modelsOf(node),
    devices = memoryOf(node);
  const loads = node.healthy ? (node.load ?? []) : [];
  const queued = loads.reduce((sum, one) => sum + one.queue_depth, 0);
  const running = runningOf(node);
  const decode = loads.reduce((sum, one) => sum + (one.in_flight ? one.tok_s_decode : 0), 0);
  const warm = rows.filter((row) => row.kind === "good").length,
    bad = rows.filter((row) => row.kind === "failed").length;
  const id = `node-${node.name}`;
  return html`<section class=${`card node is-${state.kind}`} aria-labelledby=${id}>
    <div class="node-head">
      <button type="button" class="plain twist" aria-expanded=${open} aria-label=${`Models of ${node.name}`} onClick=${() => act.open(node.name, !open)}>${open ? "▾" : "▸"}</button>
      <h2 id=${id}><bdi>${node.name}</bdi></h2>
      <${Badge} kind=${state.kind} title=${state.detail}>${state.word}</${Badge}>
      ${state.detail && state.kind !== "idle" ? html`<span class="small problem" dir="auto">${state.detail}</span>` : html`<span class="soft small hardware" title=${hardware(node)}><bdi>${hardware(node)}</bdi></span>`}
      <span class="node-figures">
        <span>${warm} warm${bad ? html` · <b class="worse">${bad} failed</b>` : ""}</span>
        <span>${running} running${queued ? html` · <b>${queued} queued</b>` : ""}</span>
        ${decode ? html`<span>${rate(decode)} <span class="unit">tok/s</span></span>` : null}
      </span>
      <span class="node-memory">${devices.slice(0, 8).map(
        (
          one,
        ) => html`<${Bar} parts=${[{ share: one.total ? one.used / one.total : 0, kind: one.used > 0.95 * one.total ? "high" : "" }]}
        label=${`${one.label}: ${memory(one.used)} of ${memory(one.total)} used`} />`,
      )}
        ${devices.length > 0 && html`<span class="small soft">${memory(devices.reduce((sum, one) => sum + one.used, 0))} of ${memory(devices.reduce((sum, one) => sum + one.total, 0))}</span>`}</span>
      <${Menu} label=${`Actions for ${node.name}`} items=${[
        node.kind === "neuron" && { label: "Load model…", run: () => act.dialog("load", node.name) },
        node.cordoned
          ? { label: "Uncordon…", run: () => act.dialog("uncordon", node.name) }
          : { label: "Cordon…", run: () => act.dialog("cordon", node.name) },
        { label: "Drain…", run: () => act.dialog("drain", node.name) },
      ]} />
    </div>
    ${
      open &&
      (rows.length
        ? html`<div class="scroll" tabindex="0" role="group" aria-label=${`Models of ${node.name}`}><table class="models">
      <thead><tr><th scope="col">Model</th><th scope="col">State</th><th scope="col" class="n">Running</th><th scope="col" class="n">Queued</th><th scope="col" class="n">Decode</th><th scope="col" class="n">Prefix hits</th><th scope="col" class="n">Memory</th><th scope="col" class="n">Context</th><th><span class="unseen">Actions</span></th></tr></thead>
      <tbody>${rows.map((row) => html`<${ModelRow} key=${row.id} row=${row} node=${node} act=${act} />`)}</tbody></table></div>`
        : html`<${Empty} title="No models">Nothing is loaded here. The gateway loads a model when a request needs it.</${Empty}>`)
    }
  </section>`;
});

function State({ row }) {
  const fraction = row.progress?.fraction;
  if (row.kind === "wait" && row.progress) {
    const stage = row.progress.stage ?? row.word,
      eta = row.progress.eta_secs;
    const words = `${stage}${fraction == null ? "" : ` ${Math.round(fraction * 100)} %`}${eta ? `, about ${duration(eta * 1000)} left` : ""}`;
    return html`<span class="load-state"><${Badge} kind="wait">${row.word}</${Badge}>
      <progress max="1" value=${fraction ?? undefined} aria-label=${`Loading ${row.id}`}></progress><span class="small soft">${words}</span></span>`;
  }
  return html`<span class="load-state"><${Badge} kind=${row.kind} title=${row.detail}>${row.word}</${Badge}>${row.detail && html`<span class="small soft why" dir="auto">${row.detail}</span>`}</span>`;
}

function ModelRow({ row, node, act }) {
  const hits = hitRate(row.load),
    info = row.info;
  const canUnload =
    node.kind === "neuron" && node.healthy && info && info.status !== "loading" && row.word !== "unloading";
  return html`<tr><th scope="row"><${ModelName} id=${row.id} /></th>
    <td><${State} row=${row} /></td>
    <td class="n">${Math.max(row.running, row.load?.in_flight ?? 0)}</td>
    <td class="n">${row.load?.queue_depth ?? "–"}</td>
    <td class="n">${row.load?.tok_s_decode ? html`${rate(row.load.tok_s_decode)} <span class="unit">tok/s</span>` : "–"}</td>
    <td class="n">${hits == null ? "–" : html`${Math.round(hits * 100)} <span class="unit">%</span>`}</td>
    <td class="n">${info?.vram_used_mb == null ? "–" : memory(info.vram_used_mb)}</td>
    <td class="n">${info?.limit ? context(info.limit.context) : "–"}</td>
    <td class="n"><${Menu} label=${`Actions for ${row.id}`} items=${[
      row.kind === "good" && {
        label: "Chat",
        run: () => {
          location.hash = `#/playground?model=${encodeURIComponent(row.id)}`;
        },
      },
      canUnload && { label: "Unload…", run: () => act.dialog("unload", node.name, row.id) },
      !canUnload &&
        node.kind === "neuron" &&
        row.kind !== "wait" && { label: "Load…", run: () => act.dialog("load", node.name, row.id) },
      { label: "Why here?", run: () => act.dialog("explain", node.name, row.id) },
    ]} /></td></tr>`;
}

const ORDER = ["failed", "warned", "wait", "good", "idle"];

// One row per model, over all nodes.
function ModelTable({ nodes, words, act }) {
  const byModel = new Map();
  for (const node of nodes)
    for (const row of modelsOf(node)) byModel.set(row.id, [...(byModel.get(row.id) ?? []), row]);
  const list = [...byModel]
    .filter(([id]) => !words || id.toLowerCase().includes(words))
    .sort(([a], [b]) => a.localeCompare(b));
  for (const [, rows] of list) rows.sort((a, b) => ORDER.indexOf(a.kind) - ORDER.indexOf(b.kind)); // what needs attention comes first
  if (!list.length)
    return html`<section class="card"><${Empty} title=${words ? "Nothing matches" : "No models"}>${words ? `No model contains “${words}”.` : "No node has a model loaded."}</${Empty}></section>`;
  return html`<section class="card"><div class="scroll" tabindex="0" role="group" aria-label="Models"><table class="models">
    <thead><tr><th scope="col">Model</th><th scope="col">Nodes</th><th scope="col" class="n">Running</th><th scope="col" class="n">Queued</th><th scope="col" class="n">Decode</th><th scope="col" class="n">Prefix hits</th><th scope="col" class="n">Context</th><th><span class="unseen">Actions</span></th></tr></thead>
    <tbody>${list.map(([id, rows]) => {
      const sum = (pick) => rows.reduce((total, row) => total + pick(row), 0);
      const prompt = sum((row) => row.load?.prompt_tokens_total ?? 0),
        decode = sum((row) => (row.load?.in_flight ? row.load.tok_s_decode : 0));
      const longest = Math.max(...rows.map((row) => row.info?.limit?.context ?? 0));
      return html`<tr key=${id}><th scope="row"><${ModelName} id=${id} /></th>
        <td class="wrap">${rows.slice(0, MOST_PLACES).map((row) => html`<${Badge} key=${row.node} kind=${row.kind} title=${row.detail ?? row.word}>${row.node}: ${row.word}</${Badge}> `)}
          ${rows.length > MOST_PLACES && html`<span class="soft">and ${rows.length - MOST_PLACES} more</span>`}</td>
        <td class="n">${sum((row) => Math.max(row.running, row.load?.in_flight ?? 0))}</td><td class="n">${sum((row) => row.load?.queue_depth ?? 0)}</td>
        <td class="n">${decode ? html`${rate(decode)} <span class="unit">tok/s</span>` : "–"}</td>
        <td class="n">${prompt ? html`${Math.round((sum((row) => row.load?.cached_prompt_tokens_total ?? 0) / prompt) * 100)} <span class="unit">%</span>` : "–"}</td>
        <td class="n">${longest ? context(longest) : "–"}</td>
        <td class="n"><${Menu} label=${`Actions for ${id}`} items=${[
          {
            label: "Chat",
            run: () => {
              location.hash = `#/playground?model=${encodeURIComponent(id)}`;
            },
          },
          { label: "Load…", run: () => act.dialog("load", undefined, id) },
          { label: "Where would a request go?", run: () => act.dialog("explain", undefined, id) },
        ]} /></td></tr>`;
    })}</tbody></table></div></section>`;
}

// What an account without admin rights sees: the models that its key may use.
function ModelsOfUser() {
  const models = useStore(live, (state) => state.models);
  const [filter, setFilter] = useState("");
  if (!models) return html`<${Loading} rows=${6} label="Loading the models" />`;
  const words = filter.trim().toLowerCase();
  const visible = models.filter((model) => model.id.toLowerCase().includes(words));
  const KIND = { warm: "good", loading: "wait", recovering: "warned", cold: "idle" };
  return html`<div class="title"><h1>Models</h1><div class="tools">
      <label class="unseen" for="fleet-filter">Filter models</label>
      <input id="fleet-filter" type="search" placeholder="Filter  /" value=${filter} onInput=${(event) => setFilter(event.target.value)} /></div></div>
    <section class="card">${
      visible.length
        ? html`<div class="scroll" tabindex="0" role="group" aria-label="Models"><table class="models few">
      <thead><tr><th scope="col">Model</th><th scope="col">State</th><th scope="col" class="n">Context</th><th scope="col">Features</th><th><span class="unseen">Actions</span></th></tr></thead>
      <tbody>${visible.map(
        (model) => html`<tr key=${model.id}><th scope="row"><${ModelName} id=${model.id} /></th>
        <td><${State} row=${{ id: model.id, kind: KIND[model.state], word: model.state, progress: model.progress }} /></td>
        <td class="n">${model.limit ? context(model.limit.context) : "–"}</td>
        <td class="soft">${[model.capabilities.includes("vision") && "images", model.tool_call && "tools", model.reasoning && "reasoning"].filter(Boolean).join(", ")}</td>
        <td class="n"><a class="button small" href=${`#/playground?model=${encodeURIComponent(model.id)}`}>Chat</a></td></tr>`,
      )}</tbody></table></div>`
        : html`<${Empty} title=${words ? "Nothing matches" : "No models"}>${words ? `No model contains “${filter}”.` : "This key may use no model, or the gateway has none."}</${Empty}>`
    }</section>
    <p class="soft small">Cold models load when a request needs them. ${plural(models.length, "model")} and aliases are available to this key.</p>`;
}
