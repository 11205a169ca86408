// Usage: charged tokens per day as stacked bars, sums as a table, and the same as CSV.

import { get, send, seesAllAccounts, session } from "./api.js";
import { compact, count, html, nameParts, useEffect, useRef, useState, useStore } from "./lib.js";
import { Badge, Empty, Failed, Figures, Loading, Notice, toast, useLoad } from "./ui.js";

const GROUPS = { model: "model", key_id: "key", account_id: "account" };
const MEASURES = {
  charged: "Charged tokens",
  completion: "Output tokens",
  prompt: "Prompt tokens",
  requests: "Requests",
};
const MOST_COLORS = 5; // the sixth color is for all other groups
const OTHER = "others";

export default function Usage() {
  const value = useStore(session);
  const admin = seesAllAccounts(value);
  const [days, setDays] = useState(30);
  const [chosen, setGroup] = useState("model");
  const [measure, setMeasure] = useState("charged");
  const { data, error, loading, reload } = useLoad(
    async () => ({ days, group: chosen, ...(await get(`/api/usage?days=${days}&by=day,${chosen}`)) }),
    [days, chosen, value?.account_id],
  );
  const group = data?.group ?? chosen; // old rows stay until the rows of the new choice have arrived
  const [exporting, setExporting] = useState(false);
  const download = async () => {
    setExporting(true);
    try {
      const blob = await (await send(`/api/usage?days=${days}&format=csv`)).blob();
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
  const rows = data?.usage ?? [];
  const sum = (list, name) => list.reduce((total, row) => total + row[name], 0);
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
    };
    for (const name of Object.keys(total)) if (name !== "name") total[name] += row[name];
    totals.set(row[group], total);
  }
  const table = [...totals.values()].sort((a, b) => b[measure] - a[measure]);
  const prompt = sum(rows, "prompt");
  return html`<div class="title"><h1>Usage</h1><div class="tools">
      <div class="segments" role="group" aria-label="Period">${[7, 30, 90].map((one) => html`<button type="button" aria-pressed=${days === one} onClick=${() => setDays(one)}>${one} days</button>`)}</div>
      <label class="unseen" for="usage-group">Group by</label><select id="usage-group" value=${chosen} onChange=${(event) => setGroup(event.target.value)}>${Object.entries(
        GROUPS,
      )
        .filter(([name]) => admin || name !== "account_id")
        .map(([name, words]) => html`<option key=${name} value=${name}>by ${words}</option>`)}</select>
      <label class="unseen" for="usage-measure">Show</label><select id="usage-measure" value=${measure} onChange=${(event) => setMeasure(event.target.value)}>${Object.entries(MEASURES).map(([name, words]) => html`<option key=${name} value=${name}>${words}</option>`)}</select>
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
            ]} />
        <section class=${`card ${loading ? "stale" : ""}`} aria-label="Chart"><${Chart} rows=${rows} days=${data.days} group=${group} measure=${measure} order=${table.map((row) => row.name)} /></section>
        <section class="card"><div class="scroll" tabindex="0" role="group" aria-label="Sums"><table><thead><tr><th scope="col">${GROUPS[group][0].toUpperCase()}${GROUPS[group].slice(1)}</th><th scope="col" class="n">Requests</th><th scope="col" class="n">Prompt</th><th scope="col" class="n">Cached</th><th scope="col" class="n">Output</th><th scope="col" class="n">Charged</th></tr></thead>
          <tbody>${table.map(
            (
              row,
            ) => html`<tr key=${row.name}><th scope="row"><bdi>${row.name}</bdi>${row.estimated > 0 && html` <${Badge} kind="estimated" title="charges that the gateway estimated, because the node reported no tokens">${row.estimated} estimated</${Badge}>`}</th>
            <td class="n">${count(row.requests)}</td><td class="n">${count(row.prompt)}</td><td class="n">${count(row.cached)}</td><td class="n">${count(row.completion)}</td><td class="n">${count(row.charged)}</td></tr>`,
          )}</tbody></table></div></section>
        <p class="soft small">Days are UTC. Requests without a key, running requests and requests that were not charged are not included.</p>`
    }`;
}

const HEIGHT = 240,
  LEFT = 48,
  BOTTOM = 22,
  TOP = 10;

function Chart({ rows, days, group, measure, order }) {
  const [at, setAt] = useState(null);
  const [width, setWidth] = useState(900);
  const figure = useRef(null);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.max(320, Math.round(entry.contentRect.width))));
    observer.observe(figure.current);
    return () => observer.disconnect();
  }, []);
  const today = Math.floor(Date.now() / 86_400_000);
  const dates = Array.from({ length: days }, (_, index) =>
    new Date((today - days + 1 + index) * 86_400_000).toISOString().slice(0, 10),
  );
  const names = order.length > MOST_COLORS + 1 ? [...order.slice(0, MOST_COLORS), OTHER] : order;
  const place = new Map(names.map((name, index) => [name, index]));
  const stacks = new Map(dates.map((date) => [date, new Array(names.length).fill(0)]));
  for (const row of rows)
    if (stacks.has(row.day)) stacks.get(row.day)[place.get(row[group]) ?? names.length - 1] += row[measure];
  const totals = dates.map((date) => stacks.get(date).reduce((sum, value) => sum + value, 0));
  const top = niceTop(Math.max(1, ...totals));
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
        ? "Usage on one day only. Point at a bar, or focus the chart and use the arrow keys."
        : "Point at a bar, or focus the chart and use the arrow keys."
      : `${dates[at]}: ${count(totals[at])} ${MEASURES[measure].toLowerCase()}${
          totals[at]
            ? `: ${names
                .map((name, index) => [name, stacks.get(dates[at])[index]])
                .filter(([, value]) => value)
                .map(([name, value]) => `${name} ${compact(value)}`)
                .join(", ")}`
            : ""
        }`;
  return html`<figure class="bars" ref=${figure}><figcaption><ul class="legend"><li><strong>${MEASURES[measure]}</strong> <span class="unit">per day</span></li>${names.map((name, index) => html`<li key=${name} class=${`s${Math.min(index, 5)}`}><i></i><bdi>${nameParts(name)[1]}</bdi></li>`)}</ul></figcaption>
    <svg viewBox=${`0 0 ${width} ${HEIGHT}`} role="img" aria-label=${`${MEASURES[measure]} per day; the table has the sums`} tabindex="0" onKeyDown=${onKeyDown} onPointerLeave=${() => setAt(null)} onBlur=${() => setAt(null)}>
      ${[0, 0.25, 0.5, 0.75, 1].map((share) => html`<line class="axis" x1=${LEFT} x2=${width} y1=${y(top * share)} y2=${y(top * share)} /><text x=${LEFT - 6} y=${y(top * share) + 4} text-anchor="end">${compact(top * share)}</text>`)}
      ${dates.map((date, day) => {
        let below = 0;
        return html`<g key=${date} class=${at === day ? "active" : ""} onPointerEnter=${() => setAt(day)}><rect class="hit" x=${LEFT + day * step} y=${TOP} width=${step} height=${HEIGHT - TOP - BOTTOM} />
          ${stacks.get(date).map((value, index) => {
            if (!value) return null;
            const rect = html`<rect class=${`fill s${Math.min(index, 5)}`} x=${LEFT + day * step + (step - bar) / 2} width=${bar} y=${y(below + value)} height=${Math.max(1, y(below) - y(below + value))} />`;
            below += value;
            return rect;
          })}${day % every === 0 && html`<text x=${LEFT + day * step + step / 2} y=${HEIGHT - 6} text-anchor="middle">${date.slice(5)}</text>`}</g>`;
      })}</svg><p class="read" role="status">${read}</p></figure>`;
}

function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 8, 10].map((factor) => factor * power).find((one) => one >= value);
}
