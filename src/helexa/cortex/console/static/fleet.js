// The fleet: nodes with their memory and models, and what administrators can do with them.

import { configFile, requireAdmin, seesFleet, session } from "./api.js";
import { NodeDialog } from "./node_dialogs.js";
import { count, html, memo, memory, rate, useEffect, useMemo, useState, useStore } from "./lib.js";
import { live } from "./live.js";
import { hardware, loadedOn, memoryOf, modelsOf, nodeState, problems, runningOf, sums } from "./fleet_model.js";
import { ColdModels, MODEL_COLUMNS, ModelTable, ModelsOfUser, modelRow, useColdModels } from "./model_tables.js";
import { Table } from "./table.js";
import { Trends } from "./trends.js";
import { Badge, Bar, Empty, Figures, Loading, Menu, Notice } from "./ui.js";

const EXPANDED_NODES = 8; // longer lists begin with closed nodes
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
  const cold = useColdModels(nodes);
  if (!nodes) return html`<${Loading} rows=${6} label="Loading the fleet" />`;
  const words = filter.trim().toLowerCase();
  const matches = (node) =>
    !words ||
    `${node.name} ${nodeState(node).word} ${hardware(node)}`.toLowerCase().includes(words) ||
    node.models.some((info) => info.id.toLowerCase().includes(words));
  const visible = nodes.filter(matches);
  const visibleCold = cold.filter((model) => model.id.toLowerCase().includes(words));
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
      { label: "Running requests", value: count(all.running) },
      { label: "Queued requests", value: count(all.queued), kind: all.queued ? "warned" : "" },
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
    <${Trends} />
    ${
      nodes.length === 0
        ? html`<section class="card"><${Empty} title="No nodes yet">Add a [[neurons]] table with the node's name and endpoint to ${configFile()}. The gateway reads the file when it changes.</${Empty}></section>`
        : view === "nodes"
          ? visible.length || visibleCold.length
            ? html`<div class="nodes">${visible.slice(0, shown).map(
                (node) => html`<${NodeCard} key=${node.name} node=${node} act=${act}
          open=${open[node.name] ?? visible.length <= EXPANDED_NODES} />`,
              )}</div><${ColdModels} models=${visibleCold} act=${act} />`
            : html`<section class="card"><${Empty} title="Nothing matches" action=${html`<button type="button" class="button" onClick=${() => setFilter("")}>Clear the filter</button>`}>No node or model contains “${filter}”.</${Empty}></section>`
          : html`<${ModelTable} nodes=${nodes} cold=${visibleCold} words=${words} act=${act} />`
    }
    ${dialog && html`<${NodeDialog} ...${dialog} onClose=${() => setDialog(null)} />`}`;
}

const ACTION_WORDS = {
  load: "Loading a model",
  unload: "Unloading a model",
  "unload-all": "Unloading all models",
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
      <h2 id=${id} title=${node.name}><bdi>${node.name}</bdi></h2>
      <${Badge} kind=${state.kind} title=${state.detail}>${state.word}</${Badge}>
      <div class="node-facts">
        ${state.detail && state.kind !== "idle" ? html`<span class="small problem" dir="auto">${state.detail}</span>` : html`<span class="soft small hardware" title=${hardware(node)}><bdi>${hardware(node)}</bdi></span>`}
        <span class="node-figures">
          <span>${count(warm)} warm${bad ? html` · <b class="worse">${count(bad)} failed</b>` : ""}</span>
          <span>${count(running)} running${queued ? html` · <b>${count(queued)} queued</b>` : ""}</span>
          ${decode ? html`<span>${rate(decode)} <span class="unit">tok/s</span></span>` : null}
        </span>
        ${
          devices.length > 0 &&
          html`<span class="node-memory"><span class="meters">${devices.slice(0, 8).map(
            (
              one,
            ) => html`<${Bar} parts=${[{ share: one.total ? one.used / one.total : 0, kind: one.used > 0.95 * one.total ? "high" : "" }]}
            label=${`${one.label}: ${memory(one.used)} of ${memory(one.total)} used`} />`,
          )}</span>
          <span class="small soft">${memory(devices.reduce((sum, one) => sum + one.used, 0))} of ${memory(devices.reduce((sum, one) => sum + one.total, 0))}</span></span>`
        }
      </div>
      <${Menu} label=${`Actions for ${node.name}`} items=${[
        node.kind === "neuron" && { label: "Load model…", run: () => act.dialog("load", node.name) },
        node.cordoned
          ? { label: "Uncordon…", run: () => act.dialog("uncordon", node.name) }
          : { label: "Cordon…", run: () => act.dialog("cordon", node.name) },
        { label: "Drain…", run: () => act.dialog("drain", node.name) },
        loadedOn(node).length > 1 && { label: "Unload all models…", run: () => act.dialog("unload-all", node.name) },
      ]} />
    </div>
    ${
      open &&
      (rows.length
        ? html`<${Table} label=${`Models of ${node.name}`} kind="models" columns=${MODEL_COLUMNS} rows=${rows.map((row) => modelRow(row, node, act))} />`
        : html`<${Empty} title="No models">Nothing is loaded here. The gateway loads a model when a request needs it.</${Empty}>`)
    }
  </section>`;
});
