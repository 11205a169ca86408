// The live state of the fleet: one stream of events for the whole page, which reconnects by itself.

import { events, seesFleet, send, session, sessionEnded } from "./api.js";
import { createStore } from "./lib.js";

const MOST_REQUESTS = 10_000;
const FIRST_RETRY_MS = 500;
const LONGEST_RETRY_MS = 8_000;

// `state`: connecting, live, or lost with the time since when. `nodes` are in configured order; null: not known yet.
export const live = createStore({ state: "connecting", since: 0, problem: "", nodes: null, models: null });

// Finished requests that arrived on the stream, newest first, and the number of those that were lost.
export const requests = createStore({ rows: [], lost: 0 });

let byName = new Map();
let names = [];
let controller = null;
let running = 0;

export function startLive() {
  const connect = () => {
    controller?.abort();
    if (document.hidden) return; // a browser allows few connections to one server
    controller = new AbortController();
    follow(controller.signal, ++running);
  };
  let identity;
  session.subscribe(() => {
    const value = session.get();
    const next = value && JSON.stringify([value.signed_in, value.account_id, value.key_id, value.role, value.csrf]);
    if (next === identity) return;
    identity = next;
    byName = new Map();
    names = [];
    live.set((state) => ({ ...state, nodes: null, models: null }));
    requests.set({ rows: [], lost: 0 });
    connect();
  });
  document.addEventListener("visibilitychange", connect);
  connect();
}

async function follow(signal, run) {
  let pause = FIRST_RETRY_MS;
  while (!signal.aborted && run === running) {
    const value = session.get();
    if (!value || (value.require_auth && !value.signed_in)) return;
    const topics = seesFleet(value) ? "nodes,activity" : "models,activity";
    try {
      const response = await send(`/api/events?topics=${topics}`, { signal });
      byName = new Map();
      pause = FIRST_RETRY_MS;
      live.set((state) => ({ ...state, state: "live", problem: "" }));
      await read(response);
      lost("The connection to the gateway ended.");
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401 || error.status === 403) {
        return;
      }
      lost(error.message);
    }
    if (signal.aborted) return;
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(pause * 2, LONGEST_RETRY_MS);
  }
}

function lost(problem) {
  live.set((state) => ({ ...state, state: "lost", problem, since: state.state === "lost" ? state.since : Date.now() }));
}

// Events that arrive together change the stores once, at most once per frame.
async function read(response) {
  let fresh = [],
    nodesChanged = false,
    models = null,
    dropped = 0,
    scheduled = false;
  const apply = () => {
    scheduled = false;
    if (nodesChanged || models) {
      const nodes = nodesChanged ? names.map((name) => byName.get(name)).filter(Boolean) : null;
      live.set((state) => ({ ...state, ...(nodes ? { nodes } : {}), ...(models ? { models } : {}) }));
    }
    if (fresh.length || dropped) {
      const added = fresh.reverse(),
        lostNow = dropped;
      requests.set(({ rows, lost }) => ({ rows: [...added, ...rows].slice(0, MOST_REQUESTS), lost: lost + lostNow }));
    }
    fresh = [];
    nodesChanged = false;
    models = null;
    dropped = 0;
  };
  for await (const { event, data } of events(response)) {
    if (event === "comment") continue;
    const value = JSON.parse(data);
    if (event === "names") {
      names = value;
      for (const name of [...byName.keys()]) if (!names.includes(name)) byName.delete(name);
      nodesChanged = true;
    } else if (event === "node") {
      byName.set(value.name, value);
      nodesChanged = true;
    } else if (event === "models") models = value;
    else if (event === "request") fresh.push(value);
    else if (event === "dropped") dropped += value.requests;
    else if (event === "end") {
      apply();
      if (value.error.code !== "shutting_down") await sessionEnded(value.error);
      return;
    }
    if (!scheduled) {
      scheduled = true;
      requestAnimationFrame(apply);
    }
  }
  apply();
}
