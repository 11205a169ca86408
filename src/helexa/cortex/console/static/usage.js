// Usage: charged tokens and costs per day or hour as stacked bars, sums as a table, and the same as CSV.

import { get, send, seesAllAccounts, session } from "./api.js";
import { clock, compact, count, html, money, useEffect, useMemo, useRef, useState, useStore } from "./lib.js";
import { Table } from "./table.js";
import { Badge, Empty, Failed, Figures, Loading, Notice, toast, useLoad } from "./ui.js";

const GROUPS = { model: "model", key_id: "key", account_id: "account" };
const MEASURES = {
  charged: "Charged tokens",
  completion: "Output tokens",
  prompt: "Prompt tokens",
  requests: "Requests",
  cost: "Cost",
};
const PERIODS = [
  { words: "24 hours", hours: 24, days: 2, by: "hour" },
  { words: "7 days", days: 7, by: "day" },
  { words: "30 days", days: 30, by: "day" },
  { words: "90 days", days: 90, by: "day" },
];
const HOUR_MS = 3_600_000;
const DAY_MS = 24 * HOUR_MS;
const MOST_COLORS = 5; // the sixth color is for all other groups
const OTHER = "others";

export default function Usage() {
  const value = useStore(session);
  const admin = seesAllAccounts(value);
  const [period, setPeriod] = useState(PERIODS[2]);
  const [chosen, setGroup] = useState("model");
  const [measure, setMeasure] = useState("charged");
  const { data, error, loading, reload } = useLoad(
    async () => ({
      slots: slotsOf(period),
      period,
      group: chosen,
      ...(await get(`/api/usage?days=${period.days}&by=${period.by},${chosen}`)),
    }),
    [period, chosen, value?.account_id],
  );
  const group = data?.group ?? chosen; // old rows stay until the rows of the new choice have arrived
  const [exporting, setExporting] = useState(false);
  const download = async () => {
    setExporting(true);
    try {
      const blob = await (await send(`/api/usage?days=${period.days}&by=${period.by},account_id,key_id,model&format=csv`)).blob();
      const link = document.createElement("a");
      link.href = URL.createObjectURL(blob);
      link.download = "helexa-usage.csv";
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    } catch (failure) {
      toast(failure.message, { kind: "failed" });
    } finally {
      setExporting(false);
    }
  };
  const slots = useMemo(() => new Set(data?.slots.map((slot) => slot.key)), [data]);
  const rows = (data?.usage ?? []).filter((row) => slots.has(row[data.period.by]));
  const sum = (list, name) => list.reduce((total, row) => total + row[name], 0);
  const hasCosts = rows.some((row) => row.cost != null);
  const shown = measure === "cost" && !hasCosts ? "charged" : measure;
  const totals = new Map();
  for (const row of rows) {
    const total = totals.get(row[group]) ?? {
      name: row[group],
      requests: 0,
      prompt: 0,
      completion: 0,
      cached: 0,
      charged: 0,
      estimated: 0,
      unpriced: 0,
      cost: null,
    };
    for (const name of Object.keys(total)) if (name !== "name" && row[name] != null) total[name] += row[name];
    totals.set(row[group], total);
  }
  const table = [...totals.values()].sort((a, b) => b[shown] - a[shown]);
  const prompt = sum(rows, "prompt"),
    unpriced = sum(rows, "unpriced");
  return html`<div class="title"><h1>Usage</h1><div class="tools">
      <div class="segments" role="group" aria-label="Period">${PERIODS.map((one) => html`<button type="button" aria-pressed=${period === one} onClick=${() => setPeriod(one)}>${one.words}</button>`)}</div>
      <label class="unseen" for="usage-group">Group by</label><select id="usage-group" value=${chosen} onChange=${(event) => setGroup(event.target.value)}>${Object.entries(
        GROUPS,
      )
        .filter(([name]) => admin || name !== "account_id")
        .map(([name, words]) => html`<option key=${name} value=${name}>by ${words}</option>`)}</select>
      <label class="unseen" for="usage-measure">Show</label><select id="usage-measure" value=${shown} onChange=${(event) => setMeasure(event.target.value)}>${Object.entries(MEASURES).filter(([name]) => hasCosts || name !== "cost").map(([name, words]) => html`<option key=${name} value=${name}>${words}</option>`)}</select>
      <button type="button" class="button" disabled=${exporting} onClick=${download}>${exporting ? "Exporting…" : "Export CSV"}</button></div></div>
    ${error && data && html`<${Notice} kind="failed" title="The figures are not up to date.">${error.message}</${Notice}>`}
    ${
      !data
        ? html`<section class="card">${error ? html`<${Failed} error=${error} retry=${reload} />` : html`<${Loading} rows=${6} label="Loading the usage" />`}</section>`
        : !rows.length
          ? html`<section class="card"><${Empty} title="No usage in this period" action=${html`<a class="button" href="#/connect">Connect a client</a>`}>${value?.require_auth || value?.signed_in ? "Requests with a key are charged to it and appear here." : "This gateway accepts requests without a key, and charges only requests with a key."}</${Empty}></section>`
          : html`<${Figures} items=${[
              { label: "Requests", value: compact(sum(rows, "requests")) },
              { label: "Charged", value: compact(sum(rows, "charged")), unit: "tokens" },
              { label: "Prompt", value: compact(prompt), unit: "tokens" },
              { label: "Output", value: compact(sum(rows, "completion")), unit: "tokens" },
              {
                label: "From prefix cache",
                value: prompt ? `${Math.round((sum(rows, "cached") / prompt) * 100)}` : "–",
                unit: prompt ? "% of prompts" : "",
              },
              ...(hasCosts ? [{ label: unpriced ? "Cost of priced models" : "Cost", value: money(sum(rows, "cost")) }] : []),
            ]} />
        <section class=${`card ${loading ? "stale" : ""}`} aria-label="Chart"><${Chart} rows=${rows} slots=${data.slots} by=${data.period.by} group=${group} measure=${shown} order=${table.map((row) => row.name)} /></section>
        <section class="card"><${Table} label="Sums" columns=${[
          { title: GROUPS[group][0].toUpperCase() + GROUPS[group].slice(1) },
          ...["Requests", "Prompt", "Cached", "Output", "Charged"].map((title) => ({ title, kind: "n" })),
          hasCosts && { title: "Cost", kind: "n" },
        ]} rows=${table.map(sumsRow)} /></section>
        <p class="soft small">${data.period.by === "day" ? "Days are UTC." : "Hours are in your time zone."}${hasCosts && ` Costs are in US dollars, at the prices that the catalog has now${unpriced ? `; ${count(unpriced)} requests went to models without a price` : ""}.`} Requests without a key, running requests and requests that were not charged are not included.</p>`
    }`;
}

function sumsRow(row) {
  const estimated =
    row.estimated > 0 &&
    html` <${Badge} kind="estimated" title="charges that the gateway estimated, because the node reported no tokens">${row.estimated} estimated</${Badge}>`;
  const cost = row.cost == null ? "–" : `${money(row.cost)}${row.unpriced ? " +" : ""}`;
  return {
    key: row.name,
    cells: [
      html`<bdi>${row.name}</bdi>${estimated}`,
      ...[row.requests, row.prompt, row.cached, row.completion, row.charged].map(count),
      html`<span title=${row.unpriced ? `without ${count(row.unpriced)} requests to models that have no price` : ""}>${cost}</span>`,
    ],
  };
}

const HEIGHT = 240,
  LEFT = 48,
  BOTTOM = 22,
  TOP = 10;

// The bars of the chart from left to right: {key, label, title}. The keys are those of the gateway's report.
function slotsOf({ by, days, hours }) {
  const [length, step] = by === "hour" ? [hours, HOUR_MS] : [days, DAY_MS];
  const last = Math.floor(Date.now() / step);
  return Array.from({ length }, (_, index) => {
    const at = (last - length + 1 + index) * step;
    const text = new Date(at).toISOString();
    return by === "hour"
      ? { key: `${text.slice(0, 19)}Z`, label: clock(at).slice(0, 5), title: `from ${clock(at).slice(0, 5)}` }
      : { key: text.slice(0, 10), label: text.slice(5, 10), title: text.slice(0, 10) };
  });
}

function Chart({ rows, slots, by, group, measure, order }) {
  const [at, setAt] = useState(null);
  const [width, setWidth] = useState(900);
  const figure = useRef(null);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.max(320, Math.round(entry.contentRect.width))));
    observer.observe(figure.current);
    return () => observer.disconnect();
  }, []);
  const days = slots.length,
    amount = measure === "cost" ? money : compact;
  const names = order.length > MOST_COLORS + 1 ? [...order.slice(0, MOST_COLORS), OTHER] : order;
  const place = new Map(names.map((name, index) => [name, index]));
  const stacks = new Map(slots.map(({ key }) => [key, new Array(names.length).fill(0)]));
  for (const row of rows) stacks.get(row[by])[place.get(row[group]) ?? names.length - 1] += row[measure] ?? 0;
  const totals = slots.map(({ key }) => stacks.get(key).reduce((sum, value) => sum + value, 0));
  const top = niceTop(Math.max(...totals) || 1);
  const step = (width - LEFT) / days,
    bar = Math.max(1, step - Math.min(6, step * 0.25));
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
  const onKeyDown = (event) => {
    const next = { ArrowLeft: (at ?? days) - 1, ArrowRight: (at ?? -1) + 1, Home: 0, End: days - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    setAt(Math.min(days - 1, Math.max(0, next)));
  };
  const every = Math.ceil((days * 64) / (width - LEFT));
  const used = totals.filter(Boolean).length;
  const read =
    at == null
      ? used === 1
        ? `Usage in one ${by} only. Point at a bar, or focus the chart and use the arrow keys.`
        : "Point at a bar, or focus the chart and use the arrow keys."
      : `${slots[at].title}: ${measure === "cost" ? money(totals[at]) : `${count(totals[at])} ${MEASURES[measure].toLowerCase()}`}${
          totals[at]
            ? `: ${names
                .map((name, index) => [name, stacks.get(slots[at].key)[index]])
                .filter(([, value]) => value)
                .map(([name, value]) => `${name} ${amount(value)}`)
                .join(", ")}`
            : ""
        }`;
  return html`<figure class="bars" ref=${figure}><figcaption><ul class="legend"><li><strong>${MEASURES[measure]}</strong> <span class="unit">per ${by}</span></li>${names.map((name, index) => html`<li key=${name} class=${`s${Math.min(index, 5)}`}><i></i><bdi>${name}</bdi></li>`)}</ul></figcaption>
    <svg viewBox=${`0 0 ${width} ${HEIGHT}`} role="img" aria-label=${`${MEASURES[measure]} per ${by}; the table has the sums`} tabindex="0" onKeyDown=${onKeyDown} onPointerLeave=${() => setAt(null)} onBlur=${() => setAt(null)}>
      ${[0, 0.25, 0.5, 0.75, 1].map((share) => html`<line class="axis" x1=${LEFT} x2=${width} y1=${y(top * share)} y2=${y(top * share)} /><text x=${LEFT - 6} y=${y(top * share) + 4} text-anchor="end">${amount(top * share)}</text>`)}
      ${slots.map(({ key, label }, day) => {
        let below = 0;
        return html`<g key=${key} class=${at === day ? "active" : ""} onPointerEnter=${() => setAt(day)}><rect class="hit" x=${LEFT + day * step} y=${TOP} width=${step} height=${HEIGHT - TOP - BOTTOM} />
          ${stacks.get(key).map((value, index) => {
            if (!value) return null;
            const rect = html`<rect class=${`fill s${Math.min(index, 5)}`} x=${LEFT + day * step + (step - bar) / 2} width=${bar} y=${y(below + value)} height=${Math.max(1, y(below) - y(below + value))} />`;
            below += value;
            return rect;
          })}${day % every === 0 && html`<text x=${LEFT + day * step + step / 2} y=${HEIGHT - 6} text-anchor="middle">${label}</text>`}</g>`;
      })}</svg><p class="read" role="status">${read}</p></figure>`;
}

function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 8, 10].map((factor) => factor * power).find((one) => one >= value);
}
