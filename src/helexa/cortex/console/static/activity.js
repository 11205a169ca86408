// The activity log: finished requests as they end. Only the visible rows are in the page.

import { get, seesAllAccounts, session } from "./api.js";
import {
  clock,
  compact,
  count,
  duration,
  html,
  moment,
  plural,
  rate,
  useEffect,
  useMemo,
  useRef,
  useState,
  useStore,
} from "./lib.js";
import { requests } from "./live.js";
import { Badge, Dialog, Empty, Failed, Loading, ModelName, Notice } from "./ui.js";

const ROW = 30; // pixels, as in console.css
const PAGE = 1000,
  MOST_ROWS = 10_000,
  SPARE_ROWS = 8,
  NEWEST = 500;
const keyOf = (row) => `${row.request_id} ${row.started_ms}`;

export default function Activity() {
  const value = useStore(session);
  const stream = useStore(requests);
  const [older, setOlder] = useState({ rows: null, error: null, complete: false, loading: false });
  const [filter, setFilter] = useState("");
  const [status, setStatus] = useState("");
  const [paused, setPaused] = useState(null);
  const [opened, setOpened] = useState(null);

  const load = async (before) => {
    setOlder((old) => ({ ...old, loading: true, error: null }));
    try {
      const page = (await get(`/api/activity?limit=${PAGE}${before ? `&before=${before}` : ""}`)).requests;
      setOlder((old) => ({
        rows: before ? [...old.rows, ...page] : page,
        error: null,
        loading: false,
        complete: page.length < PAGE,
      }));
    } catch (error) {
      setOlder((old) => ({ ...old, error, loading: false }));
    }
  };
  useEffect(() => {
    load();
  }, [value?.account_id]);

  const rows = useMemo(() => {
    // A request can be in the log before its event arrives.
    const logged = new Set((older.rows ?? []).slice(0, NEWEST).map(keyOf));
    return [...(paused ?? stream.rows).filter((row) => !logged.has(keyOf(row))), ...(older.rows ?? [])].slice(
      0,
      MOST_ROWS,
    );
  }, [paused, stream.rows, older.rows]);
  const words = filter.trim().toLowerCase();
  const visible = useMemo(
    () =>
      rows.filter((row) => {
        if ((status === "ok" && row.status >= 400) || (status === "failed" && row.status < 400)) return false;
        return (
          !words ||
          `${row.account_id ?? "anonymous"} ${row.key_id ?? ""} ${row.model} ${row.alias ?? ""} ${row.node ?? ""} ${row.status} ${row.error_code ?? ""} ${row.request_id} ${row.api}`
            .toLowerCase()
            .includes(words)
        );
      }),
    [rows, words, status],
  );
  const waiting = paused ? stream.rows.length - paused.length : 0;
  const more = () => {
    if (!older.complete && !older.loading && older.rows?.length && rows.length < MOST_ROWS) load(older.rows.at(-1).id);
  };

  return html`<div class="title"><h1>Activity</h1><div class="tools">
      <label class="unseen" for="activity-filter">Filter requests</label>
      <input id="activity-filter" type="search" placeholder="Account, model, node, id…  /" value=${filter} onInput=${(event) => setFilter(event.target.value)} />
      <label class="unseen" for="activity-status">Status</label>
      <select id="activity-status" value=${status} onChange=${(event) => setStatus(event.target.value)}><option value="">All</option><option value="ok">Answered</option><option value="failed">Failed or canceled</option></select>
      <button type="button" class="button" aria-pressed=${paused !== null} onClick=${() => setPaused(paused ? null : stream.rows)}>${paused ? `Resume${waiting ? ` (${waiting} new)` : ""}` : "Pause"}</button></div></div>
    <p class="soft small">${seesAllAccounts(value) ? "Requests of all accounts" : "Requests of your account"}, newest first. ${count(visible.length)} of ${count(rows.length)} shown${older.complete ? "" : "; scroll down for older ones"}.</p>
    ${stream.lost > 0 && html`<${Notice} title="Too many requests to show live.">${plural(stream.lost, "request")} were left out here; the log has them.</${Notice}>`}
    <section class="card log">${
      older.rows === null && older.error
        ? html`<${Failed} error=${older.error} retry=${() => load()} />`
        : older.rows === null
          ? html`<${Loading} rows=${8} label="Loading the activity log" />`
          : visible.length
            ? html`<${Rows} rows=${visible} open=${setOpened} more=${more} all=${seesAllAccounts(value)} />`
            : rows.length
              ? html`<${Empty} title="Nothing matches" action=${html`<button type="button" class="button" onClick=${() => {
                  setFilter("");
                  setStatus("");
                }}>Clear the filters</button>`}>No request has these properties.</${Empty}>`
              : html`<${Empty} title="No requests yet" action=${html`<a class="button" href="#/connect">Connect a client</a>`}>Finished requests appear here within a second.</${Empty}>`
    }
      ${older.rows !== null && older.error && html`<${Notice} kind="failed" title="Older requests could not be loaded.">${older.error.message}</${Notice}>`}</section>
    ${opened && html`<${Details} row=${opened} onClose=${() => setOpened(null)} />`}`;
}

const kindOf = (row) => (row.status === 499 ? "warned" : row.status >= 400 || row.error_code ? "failed" : "good");
const statusWords = (row) =>
  row.status === 499 ? "canceled" : (row.error_code ?? (row.status >= 400 ? `HTTP ${row.status}` : "ok"));

function Rows({ rows, open, more, all }) {
  const box = useRef(null);
  const [range, setRange] = useState([0, 40]);
  const [active, setActive] = useState(0);
  const measure = () => {
    if (!box.current) return;
    const { scrollTop, clientHeight } = box.current;
    const first = Math.max(0, Math.floor(scrollTop / ROW) - SPARE_ROWS),
      last = Math.ceil((scrollTop + clientHeight) / ROW) + SPARE_ROWS;
    setRange((old) => (old[0] === first && old[1] === last ? old : [first, last]));
    if (last >= rows.length) more();
  };
  useEffect(measure, [rows.length]);
  useEffect(() => {
    const observer = new ResizeObserver(measure);
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  const move = (index) => {
    const next = Math.min(rows.length - 1, Math.max(0, index)),
      view = box.current;
    setActive(next);
    if (next * ROW < view.scrollTop) view.scrollTop = next * ROW;
    else if ((next + 1) * ROW > view.scrollTop + view.clientHeight - ROW)
      view.scrollTop = (next + 2) * ROW - view.clientHeight;
  };
  const onKeyDown = (event) => {
    const page = Math.floor(box.current.clientHeight / ROW) - 2;
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -rows.length, End: rows.length };
    if (event.key in steps) {
      event.preventDefault();
      move(active + steps[event.key]);
    } else if (event.key === "Enter") open(rows[active]);
  };
  const [first, last] = range;
  const names = [
    "Time",
    all && "Account",
    "Model",
    "Node",
    "Status",
    "In",
    "Cached",
    "Out",
    "First token",
    "Duration",
    "Speed",
  ].filter(Boolean);
  return html`<div class=${`rows ${all ? "with-account" : ""}`} role="grid" aria-label="Requests" aria-rowcount=${rows.length + 1} tabindex="0" ref=${box}
      aria-activedescendant=${`request-${active}`} onScroll=${measure} onKeyDown=${onKeyDown}>
    <div class="row head-row" role="row" aria-rowindex="1">${names.map((name) => html`<span role="columnheader" class=${`c-${name.toLowerCase().replace(" ", "-")}`}>${name}</span>`)}</div>
    <div class="spacer" role="presentation" style=${{ height: `${rows.length * ROW}px` }}>
      ${rows.slice(first, last).map((row, offset) => {
        const index = first + offset;
        return html`<div class=${`row is-${kindOf(row)} ${index === active ? "active" : ""}`} role="row" id=${`request-${index}`} aria-rowindex=${index + 2} aria-selected=${index === active}
            key=${`${row.request_id}${row.started_ms}`} style=${{ transform: `translateY(${index * ROW}px)` }} onClick=${() => {
              setActive(index);
              open(row);
            }}>
          <span role="gridcell" class="c-time">${clock(row.started_ms)}</span>
          ${all && html`<span role="gridcell" class="c-account"><bdi>${row.account_id ?? "anonymous"}</bdi></span>`}
          <span role="gridcell" class="c-model"><${ModelName} id=${row.model} /></span>
          <span role="gridcell" class="c-node"><bdi>${row.node ?? "–"}</bdi></span>
          <span role="gridcell" class="c-status"><${Badge} kind=${kindOf(row)}>${statusWords(row)}</${Badge}></span>
          <span role="gridcell" class="c-in n">${compact(row.prompt)}</span>
          <span role="gridcell" class="c-cached n soft">${row.cached ? compact(row.cached) : "–"}</span>
          <span role="gridcell" class="c-out n">${compact(row.completion)}</span>
          <span role="gridcell" class="c-first-token n">${row.ttft_ms == null ? "–" : duration(row.ttft_ms)}</span>
          <span role="gridcell" class="c-duration n">${duration(row.duration_ms)}</span>
          <span role="gridcell" class="c-speed n">${row.tokens_per_second == null ? "–" : `${rate(row.tokens_per_second)}/s`}</span></div>`;
      })}</div></div>`;
}

const WHY = {
  only: "It was the only node with the model.",
  affinity: "It probably has the beginning of this prompt in its prefix cache.",
  overflow: "The node with the cached beginning of the prompt was too busy, so the next one was chosen.",
  memory: "It had the beginning of the prompt in memory.",
  disk: "It had the beginning of the prompt on its disk, and no less busy node had it in memory.",
  "least-busy": "It had the fewest requests.",
  loaded: "The model was loaded there for this request.",
};

function Details({ row, onClose }) {
  const route = Object.fromEntries(
    (row.route ?? "")
      .split(";")
      .map((part) => part.trim().split("="))
      .filter((pair) => pair.length === 2),
  );
  const facts = [
    ["Status", html`<${Badge} kind=${kindOf(row)}>${statusWords(row)}</${Badge}> HTTP ${row.status}`],
    ["Arrived", moment(row.started_ms)],
    ["Account", row.account_id ?? "anonymous"],
    ["Key", row.key_id ?? "–"],
    ["Client", row.client ? html`<code>${row.client}</code>` : "–"],
    ["Model", row.alias ? `${row.model} (requested as ${row.alias})` : row.model],
    ["Node", row.node ?? "none: the request was not forwarded"],
    ["Why this node", row.route ? html`${WHY[route.why] ?? ""} <code>${row.route}</code>` : "–"],
    ["Prompt", `${plural(row.prompt, "token")}, ${count(row.cached)} from the prefix cache`],
    ["Answer", plural(row.completion, "token")],
    ["Waited", `${duration(row.waited_ms)} before the node got the request`],
    ["First token", row.ttft_ms == null ? "–" : `after ${duration(row.ttft_ms)}`],
    ["Duration", duration(row.duration_ms)],
    ["Speed", row.tokens_per_second == null ? "–" : `${rate(row.tokens_per_second)} tokens per second`],
    ["API", html`<code>${row.api}</code>`],
    ["Request id", html`<code>${row.request_id}</code>`],
  ];
  return html`<${Dialog} title="Request" onClose=${onClose} wide><div class="body"><dl class="facts">${facts.map(([name, text]) => html`<dt>${name}</dt><dd dir="auto">${text}</dd>`)}</dl>
    <p class="soft small">The gateway stores no prompts and no answers. Its log and the node's log have lines with this request id.</p></div></${Dialog}>`;
}
