// The last hour as small line charts: output tokens, waiting requests, time to first token and memory.

import { get } from "./api.js";
import { compact, duration, html, memo, memory, rate, useEffect, useMemo, useRef, useState } from "./lib.js";
import { Failed, Loading, useLoad } from "./ui.js";

const MOST_LINES = 5; // as many as there are colors; the sum of all other lines has the sixth
const OTHERS = "others";
const nameOf = (series) => series.name ?? OTHERS;
const INTERVALS = 239; // of an hour, without the current one
const LEAST_INTERVALS = 40;
const LONGEST_GAP = 8; // intervals without a request, which the line of the time to first token bridges
const HEIGHT = 108,
  TOP = 8,
  BOTTOM = 18,
  LEFT = 52;

const CHARTS = [
  { field: "tokens_per_second", title: "Output tokens per second", text: (value) => `${rate(value)} tok/s`, adds: true },
  { field: "queued", title: "Waiting requests", text: (value) => compact(value), adds: true, least: 4 },
  { field: "first_token_ms", title: "Time to first token", text: duration, adds: false },
  { field: "memory_used_mb", title: "Memory in use", text: memory, adds: true, limit: "memory_total_mb" },
];

const stored = () => {
  try {
    return localStorage.getItem("trends");
  } catch {
    return null;
  }
};

export function Trends() {
  const [open, setOpen] = useState(() => (stored() ?? (innerWidth >= 900 ? "open" : "closed")) === "open");
  const [by, setBy] = useState("fleet");
  const toggle = () => {
    setOpen(!open);
    try {
      localStorage.setItem("trends", open ? "closed" : "open");
    } catch {
      /* private mode: the choice lasts until the page is left */
    }
  };
  return html`<section class="card trends" aria-labelledby="trends-title">
    <div class="trends-head"><h2 id="trends-title"><button type="button" class="plain" aria-expanded=${open} onClick=${toggle}>${open ? "▾" : "▸"} Last hour</button></h2>
      ${
        open &&
        html`<div class="segments" role="group" aria-label="Lines">${[
          ["fleet", "Sum"],
          ["node", "Per node"],
          ["model", "Per model"],
        ].map(([name, words]) => html`<button type="button" aria-pressed=${by === name} onClick=${() => setBy(name)}>${words}</button>`)}</div>`
      }</div>
    ${open && html`<${Charts} by=${by} />`}</section>`;
}

function Charts({ by }) {
  const [at, setAt] = useState(null); // the interval that the user points at
  const { data, error, reload } = useLoad(
    async () => sinceStart(await get(`/api/history?by=${by}&limit=${MOST_LINES}`)),
    [by],
  );
  const seconds = data?.interval_secs;
  useEffect(() => {
    if (!seconds) return undefined;
    const timer = setInterval(() => document.hidden || reload(), seconds * 1000);
    return () => clearInterval(timer);
  }, [seconds, by]);
  if (error && !data) return html`<${Failed} error=${error} retry=${reload} />`;
  if (!data) return html`<${Loading} rows=${3} label="Loading the last hour" />`;
  const shown = CHARTS.filter((chart) => data.series.some((one) => one[chart.field]?.some((value) => value != null)));
  return html`<div class="trends-body">
    ${data.by !== "fleet" && html`<ul class="legend">${data.series.map((one, color) => html`<li key=${nameOf(one)} class=${`s${color}`}><i></i><bdi>${nameOf(one)}</bdi></li>`)}</ul>`}
    ${
      shown.length
        ? html`<div class=${`trend-grid of-${shown.length}`}>${shown.map((chart) => html`<${Chart} key=${chart.field} chart=${chart} data=${data} at=${at} setAt=${setAt} />`)}</div>`
        : html`<p class="empty">There are no values yet. They appear at most ${data.interval_secs} seconds after the first request.</p>`
    }</div>`;
}

// Leave out the time before the gateway started, but show at least the last `LEAST_INTERVALS` intervals.
function sinceStart(history) {
  const known = history.series.map((one) => one.tokens_per_second.findIndex((value) => value != null));
  const start = Math.min(...known.map((place) => (place < 0 ? Infinity : place)), INTERVALS - LEAST_INTERVALS);
  const cut = (one) =>
    Object.fromEntries(Object.entries(one).map(([field, value]) => [field, Array.isArray(value) ? value.slice(start) : value]));
  return { ...history, series: history.series.map(cut) };
}

const Chart = memo(function Chart({ chart, data, at, setAt }) {
  const [width, setWidth] = useState(320);
  const figure = useRef(null);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.max(220, Math.round(entry.contentRect.width))));
    observer.observe(figure.current);
    return () => observer.disconnect();
  }, []);
  const lines = useMemo(
    () => data.series.map((one, color) => ({ name: nameOf(one), color, values: one[chart.field] })),
    [chart, data],
  );
  const count = lines[0]?.values.length ?? 0;
  const highest = Math.max(0, ...lines.flatMap((line) => line.values.filter((value) => value != null)));
  const limit = data.by === "fleet" && chart.limit ? Math.max(0, ...data.series[0][chart.limit].filter(Boolean)) : 0;
  const top = limit || niceTop(Math.max(highest, chart.least ?? 1));
  const gap = chart.adds ? 0 : LONGEST_GAP;
  const x = (place) => LEFT + ((place + 0.5) / count) * (width - LEFT);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
  const place = at ?? lastKnown(lines);
  const values = lines.map((line) => [line.name, line.values[place]]).filter(([, value]) => value != null);
  const time = (index) => new Date((data.end - (count - index) * data.interval_secs) * 1000);
  const words = values.map(([name, value]) => (name ? `${name} ${chart.text(value)}` : chart.text(value)));
  const onKeyDown = (event) => {
    const next = { ArrowLeft: (at ?? count) - 1, ArrowRight: (at ?? count - 2) + 1, Home: 0, End: count - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    setAt(Math.min(count - 1, Math.max(0, next)));
  };
  const onPointerMove = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const share = (event.clientX - box.left) / box.width;
    setAt(Math.min(count - 1, Math.max(0, Math.floor(((share * width - LEFT) / (width - LEFT)) * count))));
  };
  const title = words.length ? words.join(" · ") : "no value";
  return html`<figure class="trend" ref=${figure}>
    <figcaption><b>${chart.title}</b> <span class="soft" title=${title}>${at != null && `${clockOf(time(at))}: `}${title}</span></figcaption>
    <svg viewBox=${`0 0 ${width} ${HEIGHT}`} role="img" tabindex="0" aria-label=${`${chart.title}, highest ${chart.text(highest)}, last ${title}. Arrow keys read single values.`}
      onKeyDown=${onKeyDown} onPointerMove=${onPointerMove} onPointerLeave=${() => setAt(null)} onBlur=${() => setAt(null)}>
      ${[0, 0.5, 1].map((share) => html`<line class="axis" x1=${LEFT} x2=${width} y1=${y(top * share)} y2=${y(top * share)} />`)}
      ${[0, 1].map((share) => html`<text x=${LEFT - 6} y=${y(top * share) + 4} text-anchor="end">${share ? chart.text(top).replace(" tok/s", "") : "0"}</text>`)}
      ${[0, count / 2, count].map((index, position) => html`<text x=${LEFT + (index / count) * (width - LEFT)} y=${HEIGHT - 4} text-anchor=${["start", "middle", "end"][position]}>${clockOf(time(index))}</text>`)}
      ${lines.map((line) => html`<g key=${line.name} class=${`s${line.color}`}>${lines.length === 1 && chart.adds && html`<path class="area" d=${area(line.values, x, y)} />`}<path class="line" d=${path(line.values, gap, x, y)} />${dots(line.values, gap, x, y)}</g>`)}
      ${at != null && html`<line class="cursor" x1=${x(at)} x2=${x(at)} y1=${TOP} y2=${HEIGHT - BOTTOM} />`}
    </svg>${at != null && html`<span class="unseen" role="status">${clockOf(time(at))}: ${title}</span>`}</figure>`;
});

const clockOf = (date) => `${String(date.getHours()).padStart(2, "0")}:${String(date.getMinutes()).padStart(2, "0")}`;

function lastKnown(lines) {
  for (let place = (lines[0]?.values.length ?? 0) - 1; place >= 0; place -= 1)
    if (lines.some((line) => line.values[place] != null)) return place;
  return 0;
}

// The stretches of known values as lists of places. A stretch goes on after at most `gap` unknown values.
function stretches(values, gap) {
  const result = [];
  let last = -Infinity;
  for (const [place, value] of values.entries()) {
    if (value == null) continue;
    if (place - last <= gap + 1) result.at(-1).push(place);
    else result.push([place]);
    last = place;
  }
  return result;
}

const point = (values, x, y) => (place) => `${x(place).toFixed(1)} ${y(values[place]).toFixed(1)}`;

const path = (values, gap, x, y) =>
  stretches(values, gap)
    .filter((places) => places.length > 1)
    .map((places) => `M${places.map(point(values, x, y)).join("L")}`)
    .join("");

const area = (values, x, y) =>
  stretches(values, 0)
    .filter((places) => places.length > 1)
    .map(
      (places) =>
        `M${x(places[0]).toFixed(1)} ${y(0)}L${places.map(point(values, x, y)).join("L")}L${x(places.at(-1)).toFixed(1)} ${y(0)}Z`,
    )
    .join("");

// A value without neighbors makes no line, so it is drawn as a dot.
const dots = (values, gap, x, y) =>
  stretches(values, gap)
    .filter((places) => places.length === 1)
    .map(([place]) => html`<circle cx=${x(place)} cy=${y(values[place])} r="2.5" />`);

function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 8, 10].map((factor) => factor * power).find((one) => one >= value);
}
