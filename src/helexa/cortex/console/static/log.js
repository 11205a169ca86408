// The gateway's log: its newest lines, live, with a filter by level and text. Admins only.

import { events, requireAdmin, send, session } from "./api.js";
import { clock, html, memo, moment, plural, useEffect, useLayoutEffect, useMemo, useRef, useState, useStore } from "./lib.js";
import { Badge, CopyButton, Empty, Notice } from "./ui.js";

const MOST_LINES = 3000;
const FIRST_RETRY_MS = 500;
const LONGEST_RETRY_MS = 8_000;
const LEVELS = { DEBUG: 10, INFO: 20, WARNING: 30, ERROR: 40, CRITICAL: 50 };
const KINDS = { WARNING: "warned", ERROR: "failed", CRITICAL: "failed" };
const AT_LEAST = { 0: "All levels", 20: "Info and above", 30: "Warnings and errors", 40: "Errors only" };

export default function Log() {
  const value = useStore(session);
  return value?.role === "admin"
    ? html`<${Lines} />`
    : html`<div class="title"><h1>Log</h1></div><section class="card"><${Empty} title="The log is for administrators" action=${html`<button type="button" class="button" onClick=${() => requireAdmin("Reading the log")}>Sign in as an admin</button>`}>It may name accounts and addresses of clients.</${Empty}></section>`;
}

let nextId = 0;

function Lines() {
  const [lines, setLines] = useState([]);
  const [missed, setMissed] = useState(0);
  const [problem, setProblem] = useState("");
  const [level, setLevel] = useState(0);
  const [text, setText] = useState("");
  const [paused, setPaused] = useState(null); // the lines that are shown while the view is paused
  useEffect(() => {
    const controller = new AbortController();
    follow(controller.signal, {
      begin: () => {
        setProblem("");
        setLines([]);
      },
      add: (added) => setLines((old) => [...old, ...added].slice(-MOST_LINES)),
      miss: (count) => setMissed((old) => old + count),
      fail: setProblem,
    });
    return () => controller.abort();
  }, []);
  const all = paused ?? lines;
  const words = text.trim().toLowerCase();
  const visible = useMemo(
    () =>
      all.filter(
        (line) =>
          (LEVELS[line.level] ?? 20) >= level &&
          (!words || `${line.logger} ${line.message} ${line.request ?? ""} ${line.exception ?? ""}`.toLowerCase().includes(words)),
      ),
    [all, level, words],
  );
  const waiting = paused ? lines.length - paused.length : 0;
  const box = useRef(null),
    pinned = useRef(true);
  useLayoutEffect(() => {
    if (pinned.current && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [visible]);
  const onScroll = () => {
    pinned.current = box.current.scrollHeight - box.current.scrollTop - box.current.clientHeight < 40;
  };
  const asText = () =>
    visible
      .map((line) => `${moment(line.at_ms)} ${line.level} ${line.logger}: ${line.message}${line.request ? ` request=${line.request}` : ""}${line.exception ? `\n${line.exception}` : ""}`)
      .join("\n");
  return html`<div class="title"><h1>Log</h1><div class="tools">
      <label class="unseen" for="log-filter">Filter lines</label>
      <input id="log-filter" type="search" placeholder="Filter  /" value=${text} onInput=${(event) => setText(event.target.value)} />
      <label class="unseen" for="log-level">Level</label>
      <select id="log-level" value=${level} onChange=${(event) => setLevel(Number(event.target.value))}>${Object.entries(AT_LEAST).map(([least, name]) => html`<option key=${least} value=${least}>${name}</option>`)}</select>
      <button type="button" class="button" aria-pressed=${Boolean(paused)} onClick=${() => setPaused(paused ? null : lines)}>${paused ? `Continue${waiting > 0 ? ` (${waiting} new)` : ""}` : "Pause"}</button>
      <${CopyButton} text=${asText} label="Copy" className="button" /></div></div>
    ${problem && html`<${Notice} title="Not live.">${problem} The page reconnects by itself.</${Notice}>`}
    ${missed > 0 && html`<${Notice}>${plural(missed, "line")} came faster than this page could read, and ${missed === 1 ? "is" : "are"} missing here.</${Notice}>`}
    <section class="card log-lines" aria-label="Lines" tabindex="0" ref=${box} onScroll=${onScroll}>${
      visible.length
        ? html`<ol>${visible.map((line) => html`<${Line} key=${line.id} line=${line} />`)}</ol>`
        : html`<${Empty} title=${all.length ? "Nothing matches" : "No lines yet"}>${all.length ? "No line has this level and text." : "The gateway has written nothing since it started."}</${Empty}>`
    }</section>
    <p class="soft small">The newest lines of this gateway's process, oldest first. The page has no older lines: the gateway's own log has them, and the nodes have logs of their own. Keys and passwords are hidden.</p>`;
}

const Line = memo(function Line({ line }) {
  return html`<li><time title=${moment(line.at_ms)}>${clock(line.at_ms)}</time><${Badge} kind=${KINDS[line.level] ?? ""}>${line.level.toLowerCase()}</${Badge}>
    <span class="log-text"><span class="soft">${line.logger.replace(/^helexa\./, "")}</span> <bdi>${line.message}</bdi>${line.request && html` <span class="soft">request ${line.request}</span>`}
      ${line.exception && html`<details><summary>Traceback</summary><pre tabindex="0">${line.exception}</pre></details>`}</span></li>`;
});

// Read the topic `log` until the signal aborts; connect again when the stream ends.
async function follow(signal, { begin, add, miss, fail }) {
  let pause = FIRST_RETRY_MS;
  while (!signal.aborted) {
    try {
      const response = await send("/api/events?topics=log", { signal });
      begin();
      pause = FIRST_RETRY_MS;
      await read(response, add, miss);
      fail("The connection to the gateway ended.");
    } catch (error) {
      if (signal.aborted) return;
      fail(error.message);
      if (error.status === 401 || error.status === 403) return;
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(pause * 2, LONGEST_RETRY_MS);
  }
}

// Lines that arrive together change the page once.
async function read(response, add, miss) {
  let fresh = [];
  const apply = () => {
    const lines = fresh;
    fresh = [];
    if (lines.length) add(lines);
  };
  for await (const { event, data } of events(response)) {
    if (event === "log") {
      if (!fresh.length) requestAnimationFrame(apply);
      fresh.push({ ...JSON.parse(data), id: (nextId += 1) });
      if (fresh.length > MOST_LINES) fresh.shift(); // a hidden page draws nothing
    } else if (event === "dropped") miss(JSON.parse(data).lines);
    else if (event === "end") return;
  }
}
