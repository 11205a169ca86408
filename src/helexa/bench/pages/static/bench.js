// Scripts of the pages: they draw charts, switch the color theme, choose table columns and handle keyboard shortcuts.
// Without this file, links, forms and tables still work. A chart reads its data from a <script> in the same <figure>.
// For users who cannot see the chart, a table on the page contains the same numbers.

const root = document.documentElement;
const drawn = new Map();

const color = (name) => {
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
};
const faded = (rgb, alpha) => rgb.replace(/^rgb\(([^)]+)\)$/, `rgba($1, ${alpha})`);

function figure(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

function axisLabels(x) {
  if (x.kind === "category") return (plot, splits) => splits.map((at) => (Number.isInteger(at) ? x.names[at] ?? "" : ""));
  if (x.kind === "time") {
    return (plot, splits) => splits.map((at) => new Date(at * 1000).toISOString().slice(5, 10));
  }
  return (plot, splits) => splits.map((at) => (at == null ? null : figure(at)));
}

function options(spec, width) {
  const ink = color("--soft"), grid = { stroke: color("--line"), width: 1 };
  const palette = [0, 1, 2, 3, 4, 5].map((number) => color(`--c${number}`));
  const series = [{}], bands = [], data = [spec.x.values];
  for (const band of spec.bands ?? []) {
    const fill = faded(palette[band.color], 0.16);
    for (const values of [band.high, band.low]) {
      data.push(values);
      series.push({ scale: "y", stroke: "transparent", width: 0, points: { show: false }, spanGaps: false });
    }
    bands.push({ series: [series.length - 2, series.length - 1], fill });
  }
  for (const one of spec.series) {
    const stroke = palette[one.color % palette.length];
    const dots = one.style === "dots";
    data.push(one.values);
    series.push({
      scale: "y", stroke: dots ? undefined : stroke, width: one.style === "step" ? 1 : 2,
      dash: one.style === "dash" ? [6, 5] : one.style === "step" ? [2, 3] : undefined,
      paths: dots ? () => null : undefined, spanGaps: true,
      points: { show: one.style !== "step" && one.style !== "dash", size: dots ? 8 : 6, stroke, fill: dots ? stroke : color("--card") },
    });
  }
  const log = spec.x.kind === "log";
  const font = "11px " + getComputedStyle(root).fontFamily;
  return {
    data,
    settings: {
      width, height: spec.height ?? 300, series, bands, legend: { show: false },
      padding: [14, 26, 0, 0],
      cursor: { drag: { x: false, y: false }, points: { size: 9 }, y: false },
      scales: {
        x: { time: false, distr: log ? 3 : 1, log: 2, range: log ? undefined : spec.x.kind === "category" ? (plot, low, high) => [low - 0.5, high + 0.5] : undefined },
        y: { range: (plot, low, high) => (low == null ? [0, 1] : spec.zero ? [0, high * 1.08] : padded(low, high)) },
      },
      axes: [
        { stroke: ink, grid: { show: false }, ticks: grid, font, size: 34, space: spec.x.kind === "category" ? 70 : 56, values: axisLabels(spec.x),
          splits: log ? () => spec.x.ticks : undefined,
          incrs: spec.x.kind === "category" ? [1, 2, 5, 10, 20, 50, 100] : undefined },
        { stroke: ink, grid, ticks: { show: false }, font, size: 56, scale: "y", values: (plot, splits) => splits.map(figure) },
      ],
      hooks: { draw: [(plot) => marks(plot, spec, ink, font)], setCursor: [(plot) => read(plot, spec)] },
    },
  };
}

const padded = (low, high) => {
  const room = Math.max((high - low) * 0.12, high * 0.02);
  return [Math.max(0, low - room), high + room];
};

function marks(plot, spec, ink, font) {
  const { ctx, bbox } = plot, scale = devicePixelRatio;
  ctx.save();
  ctx.font = font.replace("11px", `${11 * scale}px`);
  const ends = []; // x position at which the last label of each row ends; a label that would overlap moves one row down
  for (const mark of spec.marks ?? []) {
    const at = Math.round(plot.valToPos(mark.x, "x", true));
    ctx.strokeStyle = ctx.fillStyle = mark.state ? color(mark.state === "regressed" ? "--worse" : "--better") : ink;
    ctx.globalAlpha = mark.faint ? 0.35 : 1;
    ctx.setLineDash(mark.faint ? [] : [4 * scale, 3 * scale]);
    ctx.lineWidth = scale;
    ctx.beginPath();
    ctx.moveTo(at, bbox.top);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
    ctx.textAlign = at > bbox.left + bbox.width - 80 * scale ? "right" : "left";
    if (!mark.label) continue;
    const width = ctx.measureText(mark.label).width + 8 * scale, start = ctx.textAlign === "left" ? at : at - width;
    let row = 0;
    while (ends[row] > start) row += 1;
    ends[row] = start + width;
    ctx.fillText(mark.label, at + (ctx.textAlign === "left" ? 4 : -4) * scale, bbox.top + (10 + 13 * row) * scale);
  }
  ctx.restore();
}

function read(plot, spec) {
  const at = plot.cursor.idx, line = plot.root.parentElement.parentElement.querySelector(".read");
  if (!line) return;
  if (at == null) { line.textContent = ""; return; }
  const place = spec.x.kind === "category" ? spec.x.names[at]
    : spec.x.kind === "time" ? `${spec.x.names?.[at] ?? ""} ${new Date(spec.x.values[at] * 1000).toISOString().slice(0, 16).replace("T", " ")}`
    : `${figure(spec.x.values[at])} ${spec.x.unit ?? ""}`;
  const parts = [];
  for (const band of spec.bands ?? []) if (band.low[at] != null) parts.push(`${band.label} ${figure(band.low[at])}–${figure(band.high[at])}`);
  for (const one of spec.series) if (one.values[at] != null) parts.push(`${one.label} ${figure(one.values[at])} ${one.unit ?? ""}`);
  line.textContent = `${place.trim()} · ${parts.join(" · ")}`;
}

function draw(holder) {
  const place = holder.querySelector(".plot");
  const spec = JSON.parse(holder.querySelector("script").textContent);
  drawn.get(holder)?.destroy();
  const { data, settings } = options(spec, place.clientWidth);
  const plot = new uPlot(settings, data, place);
  drawn.set(holder, plot);
  place.onkeydown = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const ends = { Home: 0, End: data[0].length - 1 }[event.key];
    if (step === undefined && ends === undefined) return;
    const at = ends ?? Math.min(Math.max((plot.cursor.idx ?? (step > 0 ? -1 : data[0].length)) + step, 0), data[0].length - 1);
    plot.setCursor({ left: plot.valToPos(data[0][at], "x"), top: 10 });
    event.preventDefault();
  };
}

function drawAll() {
  for (const [holder, plot] of drawn) {
    if (!holder.isConnected) { plot.destroy(); drawn.delete(holder); }
  }
  for (const holder of document.querySelectorAll("figure.chart")) {
    if (!drawn.has(holder)) draw(holder);
  }
}

function redraw() {
  for (const holder of [...drawn.keys()]) if (holder.isConnected) draw(holder);
}

function themeButton() {
  const button = document.querySelector(".theme");
  const show = () => { button.textContent = `Theme: ${helexaTheme.current}`; };
  button.hidden = false;
  button.onclick = () => { helexaTheme.next(); show(); redraw(); };
  show();
}

// On a narrow screen, a table shows the columns that fit, and a chooser for the others.
const narrow = matchMedia("(max-width: 640px)");

function chooseColumns() {
  document.querySelectorAll(".scroll > table").forEach((table, index) => {
    const box = table.parentElement, chooser = box.previousElementSibling;
    if (chooser?.matches(".columns")) chooser.remove();
    const heads = [...(table.tHead?.rows[0]?.cells ?? [])];
    const show = (place, shown) => {
      for (const row of table.rows) if (row.cells.length === heads.length) row.cells[place].hidden = !shown;
    };
    heads.forEach((_, place) => show(place, true));
    if (!narrow.matches || heads.length < 4 || box.scrollWidth <= box.clientWidth) return;
    const key = `columns:${location.pathname}:${index}`;
    let chosen;
    try { chosen = JSON.parse(sessionStorage.getItem(key)); } catch { chosen = null; }
    if (chosen?.length !== heads.length) {
      chosen = heads.map(() => true);
      for (let place = heads.length - 1; place > 1 && box.scrollWidth > box.clientWidth; place -= 1) { chosen[place] = false; show(place, false); }
    }
    chosen.forEach((shown, place) => show(place, shown));
    const details = document.createElement("details"), summary = document.createElement("summary"), list = document.createElement("div");
    const count = () => { summary.textContent = `Columns: ${chosen.filter(Boolean).length} of ${heads.length}`; };
    details.className = "columns";
    heads.forEach((head, place) => {
      if (place === 0) return;
      const label = document.createElement("label"), check = document.createElement("input");
      check.type = "checkbox";
      check.checked = chosen[place];
      check.onchange = () => { chosen[place] = check.checked; show(place, check.checked); count(); sessionStorage.setItem(key, JSON.stringify(chosen)); };
      label.append(check, head.textContent.trim() || "Links");
      list.append(label);
    });
    count();
    details.append(summary, list);
    box.before(details);
  });
}

// Keyboard shortcuts, which are disabled in form fields: "/" moves the focus to the filters, and "g" followed by the
// number of a page opens the page.
let going = false;
addEventListener("keydown", (event) => {
  if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    document.querySelector(".ask select, .ask input")?.focus();
    event.preventDefault();
  } else if (event.key === "g") {
    going = true;
    setTimeout(() => { going = false; }, 1200);
  } else if (going && /^[0-9]$/.test(event.key)) {
    document.querySelectorAll(".top nav a")[(Number(event.key) + 9) % 10]?.click();
  }
});

let resizing;
addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => { redraw(); chooseColumns(); }, 120); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
document.addEventListener("htmx:after:swap", () => { drawAll(); chooseColumns(); });
themeButton();
drawAll();
chooseColumns();
