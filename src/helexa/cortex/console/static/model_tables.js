// Tables of models: those of a node, those of the whole fleet, those that no node has loaded, and those of an account.

import { get } from "./api.js";
import { hitRate, loadedOn, modelsOf } from "./fleet_model.js";
import {
  context,
  count,
  duration,
  html,
  memory,
  plural,
  rate,
  useEffect,
  useMemo,
  useState,
  useStore,
} from "./lib.js";
import { live } from "./live.js";
import { Table } from "./table.js";
import { Badge, Empty, Loading, Menu, ModelName, useLoad } from "./ui.js";

const MOST_PLACES = 8; // nodes that are named per model
const MOST_COLD = 20; // cold models that are listed at first
const REFRESH_MS = 30_000;

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

export const MODEL_COLUMNS = [
  { title: "Model" },
  { title: "State", kind: "lead" },
  { title: "Running", kind: "n" },
  { title: "Queued", kind: "n" },
  { title: "Decode", kind: "n" },
  { title: "Prefix hits", kind: "n" },
  { title: "Memory", kind: "n" },
  { title: "Context", kind: "n" },
  { title: "Actions", kind: "actions" },
];

const chat = (model) => ({
  label: "Chat",
  run: () => {
    location.hash = `#/playground?model=${encodeURIComponent(model)}`;
  },
});
const speed = (tokens) => (tokens ? html`${rate(tokens)} <span class="unit">tok/s</span>` : null);
const percent = (share) => (share == null ? null : html`${Math.round(share * 100)} <span class="unit">%</span>`);

// The share of cached prompt tokens; its tooltip has the size of the prompts that the node has saved on its disk.
function prefixCache(load) {
  const share = percent(hitRate(load));
  if (!share || !load.saved_prompts_mb) return share;
  return html`<span title=${`${memory(load.saved_prompts_mb)} of prompts on disk`}>${share}</span>`;
}

export function modelRow(row, node, act) {
  const info = row.info;
  const canUnload = loadedOn(node).includes(row);
  const items = [
    row.kind === "good" && chat(row.id),
    canUnload && { label: "Unload…", run: () => act.dialog("unload", node.name, row.id) },
    !canUnload &&
      node.kind === "neuron" &&
      row.kind !== "wait" && { label: "Load…", run: () => act.dialog("load", node.name, row.id) },
    { label: "Why here?", run: () => act.dialog("explain", node.name, row.id) },
  ];
  const hasMemory = node.healthy && info?.vram_used_mb != null;
  return {
    key: row.id,
    cells: [
      html`<${ModelName} id=${row.id} />`,
      html`<${State} row=${row} />`,
      count(Math.max(row.running, row.load?.in_flight ?? 0)),
      row.load ? count(row.load.queue_depth) : null,
      speed(row.load?.tok_s_decode),
      prefixCache(row.load),
      hasMemory ? memory(info.vram_used_mb) : null,
      info?.limit ? context(info.limit.context) : null,
      html`<${Menu} label=${`Actions for ${row.id}`} items=${items} />`,
    ],
  };
}

const ORDER = ["failed", "warned", "wait", "good", "idle"];

// One row per model, over all nodes.
export function ModelTable({ nodes, cold, words, act }) {
  const byModel = new Map();
  for (const node of nodes)
    for (const row of modelsOf(node)) byModel.set(row.id, [...(byModel.get(row.id) ?? []), row]);
  for (const model of cold) byModel.set(model.id, []);
  const list = [...byModel]
    .filter(([id]) => !words || id.toLowerCase().includes(words))
    .sort(([a], [b]) => a.localeCompare(b));
  for (const [, rows] of list) rows.sort((a, b) => ORDER.indexOf(a.kind) - ORDER.indexOf(b.kind)); // what needs attention comes first
  if (!list.length)
    return html`<section class="card"><${Empty} title=${words ? "Nothing matches" : "No models"}>${words ? `No model contains “${words}”.` : "No node has a model loaded."}</${Empty}></section>`;
  const tableRows = list.map(([id, rows]) => {
    const sum = (pick) => rows.reduce((total, row) => total + pick(row), 0);
    const prompt = sum((row) => row.load?.prompt_tokens_total ?? 0);
    const longest = Math.max(0, ...rows.map((row) => row.info?.limit?.context ?? 0));
    const items = [
      chat(id),
      { label: "Load…", run: () => act.dialog("load", undefined, id) },
      { label: "Where would a request go?", run: () => act.dialog("explain", undefined, id) },
    ];
    return {
      key: id,
      cells: [
        html`<${ModelName} id=${id} />`,
        html`<span class="places">${!rows.length && html`<${Badge} kind="idle">cold</${Badge}>`}${rows.slice(0, MOST_PLACES).map((row) => html`<${Badge} key=${row.node} kind=${row.kind} title=${`${row.node}: ${row.detail ?? row.word}`}>${row.node}: ${row.word}</${Badge}> `)}
          ${rows.length > MOST_PLACES && html`<span class="soft">and ${rows.length - MOST_PLACES} more</span>`}</span>`,
        count(sum((row) => Math.max(row.running, row.load?.in_flight ?? 0))),
        count(sum((row) => row.load?.queue_depth ?? 0)),
        speed(sum((row) => (row.load?.in_flight ? row.load.tok_s_decode : 0))),
        percent(prompt ? sum((row) => row.load?.cached_prompt_tokens_total ?? 0) / prompt : null),
        longest ? context(longest) : null,
        html`<${Menu} label=${`Actions for ${id}`} items=${items} />`,
      ],
    };
  });
  const columns = MODEL_COLUMNS.filter((column) => column.title !== "Memory");
  return html`<section class="card"><${Table} label="Models" kind="models" columns=${columns.map((column) => (column.title === "State" ? { title: "Nodes", kind: "lead" } : column))} rows=${tableRows} /></section>`;
}

// The models that the gateway can load and that no node has, sorted by name. The gateway is asked again when the models of
// the nodes change.
export function useColdModels(nodes) {
  const present = useMemo(() => [...new Set((nodes ?? []).flatMap((node) => modelsOf(node).map((row) => row.id)))].sort(), [nodes]);
  const { data, reload } = useLoad(() => get("/v1/models"), [present.join("\n")]);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || reload(), REFRESH_MS);
    return () => clearInterval(timer);
  }, []);
  return useMemo(() => {
    const loaded = new Set(present);
    const cold = (data?.data ?? []).filter((model) => model.state === "cold" && !model.alias_of && !loaded.has(model.id));
    return cold.sort((a, b) => a.id.localeCompare(b.id));
  }, [data, present]);
}

const COLD_COLUMNS = [
  { title: "Model" },
  { title: "Could load on", kind: "wrap" },
  { title: "Context", kind: "n" },
  { title: "Actions", kind: "actions" },
];

export function ColdModels({ models, act }) {
  const [all, setAll] = useState(false);
  if (!models.length) return null;
  const rows = models.slice(0, all ? models.length : MOST_COLD).map((model) => ({
    key: model.id,
    cells: [
      html`<${ModelName} id=${model.id} />`,
      html`<span class="soft">${model.feasible_on.slice(0, MOST_PLACES).join(", ") || "no node that is up"}${model.feasible_on.length > MOST_PLACES && ` and ${model.feasible_on.length - MOST_PLACES} more`}</span>`,
      model.limit ? context(model.limit.context) : null,
      html`<${Menu} label=${`Actions for ${model.id}`} items=${[
        { label: "Load…", run: () => act.dialog("load", undefined, model.id) },
        chat(model.id),
        { label: "Where would a request go?", run: () => act.dialog("explain", undefined, model.id) },
      ]} />`,
    ],
  }));
  return html`<section class="card cold" aria-labelledby="cold-models">
    <div class="head"><h2 id="cold-models">Cold models</h2><span class="soft small">${plural(models.length, "model")} that a request loads</span></div>
    <${Table} label="Cold models" kind="models" columns=${COLD_COLUMNS} rows=${rows} />
    ${models.length > MOST_COLD && html`<button type="button" class="plain" onClick=${() => setAll(!all)}>${all ? "Show fewer" : `Show ${models.length - MOST_COLD} more`}</button>`}</section>`;
}

const USER_COLUMNS = [
  { title: "Model" },
  { title: "State", kind: "lead" },
  { title: "Context", kind: "n" },
  { title: "Features" },
  { title: "Actions", kind: "actions" },
];
const FEATURES = [
  ["images", (model) => model.capabilities.includes("vision")],
  ["tools", (model) => model.tool_call],
  ["reasoning", (model) => model.reasoning],
];

// What an account without admin rights sees: the models that its key may use.
export function ModelsOfUser() {
  const models = useStore(live, (state) => state.models);
  const [filter, setFilter] = useState("");
  if (!models) return html`<${Loading} rows=${6} label="Loading the models" />`;
  const words = filter.trim().toLowerCase();
  const visible = models.filter((model) => model.id.toLowerCase().includes(words));
  const KIND = { warm: "good", loading: "wait", recovering: "warned", sleeping: "idle", cold: "idle", unreachable: "failed" };
  return html`<div class="title"><h1>Models</h1><div class="tools">
      <label class="unseen" for="fleet-filter">Filter models</label>
      <input id="fleet-filter" type="search" placeholder="Filter  /" value=${filter} onInput=${(event) => setFilter(event.target.value)} /></div></div>
    <section class="card">${
      visible.length
        ? html`<${Table} label="Models" kind="models few" columns=${USER_COLUMNS} rows=${visible.map((model) => ({
            key: model.id,
            cells: [
              html`<${ModelName} id=${model.id} />`,
              html`<${State} row=${{ id: model.id, kind: KIND[model.state], word: model.state, progress: model.progress }} />`,
              model.limit ? context(model.limit.context) : null,
              FEATURES.filter(([, has]) => has(model)).map(([word]) => word).join(", ") || null,
              html`<a class="button small" href=${`#/playground?model=${encodeURIComponent(model.id)}`}>Chat</a>`,
            ],
          }))} />`
        : html`<${Empty} title=${words ? "Nothing matches" : "No models"}>${words ? `No model contains “${filter}”.` : "This key may use no model, or the gateway has none."}</${Empty}>`
    }</section>
    <p class="soft small">Cold models load when a request needs them. ${plural(models.length, "model")} and aliases are available to this key.</p>`;
}
