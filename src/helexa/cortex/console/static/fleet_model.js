// What the fleet's state means: the state of nodes and models in words, and sums over nodes. No rendering.

import { sentence } from "./api.js";
import { memory, plural } from "./lib.js";

// State of a node: {kind, word, detail}.
export function nodeState(node) {
  if (!node.healthy && node.misses === 0) return { kind: "wait", word: "not polled yet", detail: "" };
  if (!node.healthy) return { kind: "failed", word: "down", detail: node.problem ?? "it does not answer" };
  if (node.misses > 0) return { kind: "warned", word: "not answering", detail: node.problem ?? "" };
  if (node.cordoned) {
    const running = runningOf(node);
    return running
      ? { kind: "wait", word: "draining", detail: plural(running, "running request") }
      : { kind: "idle", word: "cordoned", detail: "gets no new requests and loads" };
  }
  return { kind: "good", word: "up", detail: "" };
}

// Running requests of a node. The node's own report is older than the gateway's count, but includes other clients.
export function runningOf(node) {
  const own = Object.values(node.in_flight).reduce((sum, value) => sum + value, 0);
  const reported = node.healthy ? (node.load ?? []).reduce((sum, one) => sum + one.in_flight, 0) : 0;
  return Math.max(own, reported);
}

const STATUS = {
  loaded: { kind: "good", word: "warm" },
  reloading: { kind: "good", word: "reloading" },
  loading: { kind: "wait", word: "loading" },
  recovering: { kind: "warned", word: "recovering" },
  poisoned: { kind: "failed", word: "quarantined" },
  sleeping: { kind: "idle", word: "sleeping" },
  waking: { kind: "wait", word: "waking" },
  unloaded: { kind: "idle", word: "cold" },
};

// All models of a node as rows: loaded, loading and failed ones. A node's state is never changed, only replaced.
const known = new WeakMap();
export function modelsOf(node) {
  let rows = known.get(node);
  if (!rows) known.set(node, (rows = computeModels(node)));
  return rows;
}

function computeModels(node) {
  const load = new Map((node.load ?? []).map((one) => [one.id, one]));
  const progress = new Map(node.loads.map((one) => [one.model, one]));
  const failures = new Map(node.failures.map((one) => [one.model, one]));
  const poisoned = new Map((node.poisoned ?? []).map((one) => [one.model_id, one.error]));
  const rows = new Map();
  for (const info of node.models) {
    const status = info.status === "sleeping" && info.stage ? "waking" : info.status;
    rows.set(info.id, { id: info.id, info, ...(STATUS[status] ?? STATUS.loaded) });
  }
  const activation = node.activation ?? { pending: [], failed: [] };
  for (const id of [activation.in_progress, ...activation.pending].filter(Boolean)) {
    if (!rows.has(id))
      rows.set(id, { id, ...STATUS.loading, word: id === activation.in_progress ? "loading" : "queued" });
  }
  for (const id of progress.keys())
    if (rows.get(id)?.kind !== "good") rows.set(id, { ...rows.get(id), id, ...STATUS.loading });
  for (const [id, failure] of failures) {
    if (!progress.has(id) && rows.get(id)?.kind !== "good")
      rows.set(id, {
        ...rows.get(id),
        id,
        kind: "failed",
        word: "failed",
        detail: reason(failure.message, id, node.name),
        failure,
      });
  }
  for (const one of activation.failed ?? []) {
    if (!rows.has(one.model_id))
      rows.set(one.model_id, { id: one.model_id, kind: "failed", word: "failed", detail: one.error });
  }
  return [...rows.values()].map((row) => {
    const result = { ...row, load: load.get(row.id), running: node.in_flight[row.id] ?? 0, node: node.name };
    if (row.kind === "wait") {
      const own = progress.get(row.id),
        info = row.info;
      result.progress = own ?? { fraction: info?.progress, stage: info?.stage };
      if (!own && activation.in_progress === row.id)
        result.progress = { fraction: activation.progress, stage: activation.stage };
    }
    if (poisoned.has(row.id)) result.detail = poisoned.get(row.id);
    if (row.info?.servable && !row.info.servable.ok)
      Object.assign(result, {
        kind: "failed",
        word: "cannot serve",
        detail: [row.info.servable.reason, row.info.servable.detail].filter(Boolean).join(": "),
      });
    if (node.draining.includes(row.id))
      Object.assign(result, { kind: "wait", word: "unloading", detail: "waits for its running requests" });
    else if (node.failing.includes(row.id))
      Object.assign(result, {
        kind: "failed",
        word: "failing",
        detail: "requests failed; the node gets none for a moment",
      });
    else if (node.ejected.includes(row.id))
      Object.assign(result, {
        kind: "wait",
        word: "ejected",
        detail: "failed requests that other nodes served; the node gets few for a moment",
      });
    if (!node.healthy)
      Object.assign(result, { kind: "idle", word: "unreachable", progress: undefined, load: undefined });
    return result;
  });
}

// The rows of a node's models that can be unloaded.
export const loadedOn = (node) =>
  node.kind === "neuron" && node.healthy
    ? modelsOf(node).filter((row) => row.info && row.info.status !== "loading" && row.word !== "unloading")
    : [];

// The reason of a failed load, without the beginning that repeats the model and the node.
export const reason = (message, model, node) =>
  message.replace(`model '${model}' could not be loaded on node '${node}': `, "");

// Memory of a node: a list of {label, used, total} in MB, one entry per device, or one for the host.
export function memoryOf(node) {
  if (!node.healthy) return []; // the last report is out of date
  const total = new Map((node.discovery?.devices ?? []).map((device) => [device.index, device]));
  const devices = (node.devices ?? []).map((device) => ({
    label: total.get(device.index)?.name ?? `device ${device.index}`,
    used: device.vram_used_mb,
    total: total.get(device.index)?.vram_total_mb ?? device.vram_used_mb + device.vram_free_mb,
    utilization: device.utilization_pct,
    temperature: device.temp_c,
  }));
  if (devices.length) return devices;
  if (node.memory_total_mb)
    return [{ label: "memory", used: node.memory_total_mb - node.memory_free_mb, total: node.memory_total_mb }];
  return [];
}

export const hitRate = (load) =>
  load?.prompt_tokens_total ? load.cached_prompt_tokens_total / load.prompt_tokens_total : null;

export function hardware(node) {
  const discovery = node.discovery;
  if (!discovery) return node.kind === "openai" ? "third-party backend" : "";
  const names = new Map();
  for (const device of discovery.devices) names.set(device.name, (names.get(device.name) ?? 0) + 1);
  if (names.size) return [...names].map(([name, times]) => (times > 1 ? `${times} × ${name}` : name)).join(", ");
  return [discovery.cpu, discovery.memory_total_mb ? memory(discovery.memory_total_mb) : ""]
    .filter(Boolean)
    .join(" · ");
}

// Sums over all nodes for the figures above the view.
export function sums(nodes) {
  const result = {
    up: 0,
    warm: 0,
    loading: 0,
    failed: 0,
    running: 0,
    queued: 0,
    decode: 0,
    used: 0,
    total: 0,
    prompt: 0,
    cached: 0,
  };
  const machines = new Set(); // nodes on one machine report the same memory
  for (const node of nodes) {
    if (node.healthy) result.up += 1;
    for (const row of modelsOf(node)) {
      if (row.kind === "good") result.warm += 1;
      else if (row.kind === "wait" && row.word !== "unloading") result.loading += 1;
      else if (row.kind === "failed") result.failed += 1;
    }
    if (!node.healthy) continue;
    result.running += runningOf(node);
    for (const one of node.load ?? []) {
      result.queued += one.queue_depth;
      if (one.in_flight) result.decode += one.tok_s_decode;
      result.prompt += one.prompt_tokens_total;
      result.cached += one.cached_prompt_tokens_total;
    }
    const machine = node.devices?.length ? null : node.discovery?.machine;
    if (machines.has(machine)) continue;
    if (machine) machines.add(machine);
    for (const one of memoryOf(node)) {
      result.used += one.used;
      result.total += one.total;
    }
  }
  return result;
}

// What needs attention, most urgent first: {key, kind, title, text, node, model}.
export function problems(nodes) {
  const found = [];
  for (const node of nodes) {
    const state = nodeState(node);
    if (state.kind === "failed" || state.kind === "warned")
      found.push({
        key: `n:${node.name}`,
        kind: state.kind,
        title: `${node.name} is ${state.word}.`,
        text: sentence(state.detail),
        node: node.name,
      });
    if (!node.healthy) continue;
    for (const row of modelsOf(node)) {
      if (row.kind === "failed" || row.kind === "warned")
        found.push({
          key: `m:${node.name}:${row.id}`,
          kind: row.kind,
          title: `${row.id} ${row.word === "failed" ? "failed to load" : `is ${row.word}`} on ${node.name}.`,
          text: sentence(row.detail ?? ""),
          node: node.name,
          model: row.id,
          retry: row.word === "failed",
        });
    }
  }
  return found;
}
