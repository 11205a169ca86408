// API keys: budgets as they are spent, and for admins: create, change and revoke.

import { configFile, get, post, requireAdmin, send, session } from "./api.js";
import { compact, count, day, duration, html, moment, plural, useEffect, useRef, useState, useStore } from "./lib.js";
import { requests } from "./live.js";
import { Table } from "./table.js";
import { Badge, Bar, Code, Dialog, Empty, Failed, Loading, Notice, Menu, toast, useLoad } from "./ui.js";

export default function Keys() {
  const value = useStore(session);
  const newest = useStore(requests, (state) => state.rows[0]);
  const [dialog, setDialog] = useState(null);
  const [filter, setFilter] = useState("");
  const [revoked, setRevoked] = useState(false);
  const { data, error, reload } = useLoad(
    () => (value?.signed_in ? get("/api/keys") : null),
    [value?.key_id, value?.signed_in],
  );
  const admin = value?.role === "admin";
  // A finished request has changed a budget; another admin may have changed a key.
  const timer = useRef(null);
  useEffect(() => {
    if (newest)
      timer.current ??= setTimeout(() => {
        timer.current = null;
        reload();
      }, 400);
  }, [newest]);
  useEffect(() => {
    const interval = setInterval(() => {
      if (!document.hidden) reload();
    }, 5000);
    return () => {
      clearInterval(interval);
      clearTimeout(timer.current);
    };
  }, [value?.key_id]);
  const act = (next) => {
    if (requireAdmin("Changing keys")) setDialog(next);
  };
  if (!value?.signed_in)
    return html`<div class="title"><h1>Keys</h1></div><section class="card"><${Empty} title="Sign in to see keys" action=${html`<button type="button" class="button primary" onClick=${() => requireAdmin("Seeing all keys")}>Sign in</button>`}>
    This gateway accepts requests without a key. Keys give accounts budgets, limits and their own usage. An admin's key sees and changes all keys.</${Empty}></section>`;
  const words = filter.trim().toLowerCase();
  const all = data?.keys ?? [];
  const visible = all.filter(
    (key) =>
      (revoked || key.revoked_at == null) &&
      `${key.key_id} ${key.account_id} ${key.hint ?? ""}`.toLowerCase().includes(words),
  );
  const hidden = all.filter((key) => key.revoked_at != null).length;
  return html`<div class="title"><h1>Keys</h1><div class="tools">
      <label class="unseen" for="keys-filter">Filter keys</label>
      <input id="keys-filter" type="search" placeholder="Filter  /" value=${filter} onInput=${(event) => setFilter(event.target.value)} />
      ${hidden > 0 && html`<label class="check"><input type="checkbox" checked=${revoked} onChange=${(event) => setRevoked(event.target.checked)} /> ${hidden} revoked</label>`}
      ${admin && html`<button type="button" class="button primary" onClick=${() => act({ kind: "edit" })}>Create key…</button>`}</div></div>
    ${error && data && html`<${Notice} kind="failed" title="The list is not up to date.">${error.message}</${Notice}>`}
    <section class="card">${
      !data
        ? error
          ? html`<${Failed} error=${error} retry=${reload} />`
          : html`<${Loading} rows=${5} label="Loading the keys" />`
        : visible.length
          ? html`<${Table} label="Keys" kind="keys" columns=${[...COLUMNS, admin && { title: "Actions", kind: "actions" }]} rows=${visible.map((key) => keyRow(key, act))} />`
          : html`<${Empty} title=${all.length ? "Nothing matches" : "No keys yet"} action=${admin && !all.length && html`<button type="button" class="button primary" onClick=${() => act({ kind: "edit" })}>Create the first key…</button>`}>${all.length ? "No key has these words in its name or account." : admin ? "A key gives an account access, with a budget and limits if you like." : "Your account has no keys in the gateway's database."}</${Empty}>`
    }</section>
    ${
      dialog?.kind === "edit" &&
      html`<${EditKey} known=${dialog.key} onClose=${() => setDialog(null)} onDone=${(secret) => {
        reload();
        setDialog(secret ? { kind: "secret", secret } : null);
      }} />`
    }
    ${dialog?.kind === "secret" && html`<${Secret} made=${dialog.secret} onClose=${() => setDialog(null)} />`}
    ${
      dialog?.kind === "revoke" &&
      html`<${Revoke} known=${dialog.key} onClose=${() => {
        reload();
        setDialog(null);
      }} />`
    }`;
}

const COLUMNS = [
  { title: "Key" },
  { title: "Account", kind: "wrap" },
  { title: "Budget" },
  { title: "Limits", kind: "wrap" },
  { title: "Models" },
  { title: "Expires" },
];

function keyRow(key, act) {
  const isRevoked = key.revoked_at != null;
  return {
    key: `${key.key_id} ${key.source} ${key.hint}`,
    kind: isRevoked ? "ended" : "",
    cells: [
      html`<bdi>${key.key_id}</bdi>${key.hint && html` <code class="soft">${key.hint}…</code>`}${key.role === "admin" && html` <${Badge}>admin</${Badge}>`}
        ${isRevoked && html` <${Badge} kind="failed">revoked</${Badge}>`}${expired(key) && html` <${Badge} kind="warned">expired</${Badge}>`}`,
      html`<bdi>${key.account_id}</bdi>`,
      html`<${Budget} budget=${key} />`,
      html`<span class="soft">${limitWords(key)}</span>`,
      html`<span class="soft" title=${key.models?.join(", ")}>${key.models ? plural(key.models.length, "model") : "all"}</span>`,
      html`<span class="soft" title=${key.created_at ? `created ${moment(key.created_at * 1000)}` : undefined}>${key.expires_at ? day(key.expires_at * 1000) : "never"}</span>`,
      key.source === "config"
        ? html`<span class="soft small" title=${`defined in ${configFile()}; change it there`}>in cortex.toml</span>`
        : isRevoked
          ? ""
          : html`<${Menu} label=${`Actions for ${key.key_id}`} items=${[
              { label: "Change limits…", run: () => act({ kind: "edit", key }) },
              { label: "Revoke…", danger: true, run: () => act({ kind: "revoke", key }) },
            ]} />`,
    ],
  };
}

const expired = (key) => key.expires_at != null && key.expires_at * 1000 < Date.now();

function limitWords(key) {
  return (
    [
      key.requests_per_minute && `${compact(key.requests_per_minute)} requests/min`,
      key.tokens_per_minute && `${compact(key.tokens_per_minute)} tokens/min`,
      key.concurrency && `${key.concurrency} at a time`,
    ]
      .filter(Boolean)
      .join(", ") || "none"
  );
}

const period = (seconds) =>
  ({ 3600: "per hour", 86400: "per day", 604800: "per week" })[seconds] ?? `per ${duration(seconds * 1000)}`;

function Budget({ budget: key }) {
  if (key.hard_cap == null)
    return html`<span class="soft">no budget${key.spent ? `, ${compact(key.spent)} used` : ""}</span>`;
  const left = Math.max(0, key.hard_cap - key.spent - key.held),
    until = key.window_ends_at ? key.window_ends_at * 1000 - Date.now() : null;
  const words = `${count(key.spent)} of ${count(key.hard_cap)} tokens spent, ${count(key.held)} held for running requests, ${count(left)} left`;
  const window =
    key.window.kind === "balance"
      ? "never renewed"
      : `${period(key.window.seconds)}${until > 0 ? `, renewed in ${duration(until)}` : ""}`;
  return html`<span class="budget"><${Bar} label=${words} parts=${[
    { share: key.hard_cap ? key.spent / key.hard_cap : 1, kind: left ? "" : "high" },
    { share: key.hard_cap ? key.held / key.hard_cap : 0, kind: "held" },
  ]} />
    <span class="small">${compact(key.spent)} of ${compact(key.hard_cap)} <span class="soft">${window}</span></span></span>`;
}

const WINDOWS = [
  ["balance", "once, never renewed"],
  ["3600", "every hour"],
  ["86400", "every day"],
  ["604800", "every 7 days"],
  ["2592000", "every 30 days"],
];

function EditKey({ known, onClose, onDone }) {
  const models = useLoad(() => get("/v1/models"), []);
  const [form, setForm] = useState({
    account_id: known?.account_id ?? "",
    key_id: known?.key_id ?? "",
    role: known?.role ?? "user",
    models: known?.models ?? null,
    hard_cap: known?.hard_cap ?? "",
    window: known ? (known.window.kind === "balance" ? "balance" : String(known.window.seconds)) : "2592000",
    requests_per_minute: known?.requests_per_minute ?? "",
    tokens_per_minute: known?.tokens_per_minute ?? "",
    concurrency: known?.concurrency ?? "",
    expires_at: known?.expires_at ? day(known.expires_at * 1000) : "",
  });
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const field = (name) => ({
    name,
    value: form[name],
    onInput: (event) => setForm({ ...form, [name]: event.target.value }),
  });
  const number = (name) => (String(form[name]).trim() === "" ? null : Number(form[name]));
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    setProblem("");
    const body = {
      models: form.models,
      hard_cap: number("hard_cap"),
      requests_per_minute: number("requests_per_minute"),
      tokens_per_minute: number("tokens_per_minute"),
      concurrency: number("concurrency"),
      window:
        form.window === "balance" || number("hard_cap") === null
          ? { kind: "balance" }
          : { kind: "rolling", seconds: Number(form.window) },
      expires_at: form.expires_at ? new Date(`${form.expires_at}T23:59:59`).getTime() / 1000 : null,
    };
    try {
      if (known) {
        await (await send(`/api/keys/${encodeURIComponent(known.key_id)}`, { method: "PATCH", body })).json();
        toast(`The limits of ${known.key_id} are changed.`);
        onDone(null);
      } else {
        const made = await post("/api/keys", {
          ...body,
          account_id: form.account_id,
          role: form.role,
          ...(form.key_id ? { key_id: form.key_id } : {}),
        });
        onDone(made);
      }
    } catch (error) {
      setProblem(error.message);
    } finally {
      setBusy(false);
    }
  };
  const windows = WINDOWS.some(([seconds]) => seconds === form.window)
    ? WINDOWS
    : [...WINDOWS, [form.window, `every ${duration(Number(form.window) * 1000)}`]];
  const names = (models.data?.data ?? []).map((one) => one.id);
  return html`<${Dialog} title=${known ? `Change limits of ${known.key_id}` : "Create a key"} onClose=${onClose} wide><form class="body form" onSubmit=${submit}>
    ${
      !known &&
      html`<label>Account <input required pattern="[A-Za-z0-9][A-Za-z0-9._@+\\-]{0,63}" title="letters, digits and . _ @ + -" autocomplete="off" spellcheck=${false} ...${field("account_id")} /></label>
      <label>Name of the key <input pattern="[A-Za-z0-9][A-Za-z0-9._@+\\-]{0,63}" title="letters, digits and . _ @ + -" placeholder="made from the account" autocomplete="off" spellcheck=${false} ...${field("key_id")} /></label>
      <label>Role <select ...${field("role")}><option value="user">user: sees its own account</option><option value="admin">admin: sees and changes everything</option></select></label>`
    }
    <label>Expires after <input type="date" ...${field("expires_at")} /></label>
    <fieldset class="full"><legend>Budget</legend><div class="form">
      <label>Tokens <input type="number" min="0" step="1" placeholder="no budget" ...${field("hard_cap")} /></label>
      <label>Renewed <select ...${field("window")} disabled=${number("hard_cap") === null}>${windows.map(([seconds, words]) => html`<option key=${seconds} value=${seconds}>${words}</option>`)}</select></label></div></fieldset>
    <fieldset class="full"><legend>Limits, at each gateway</legend><div class="form">
      <label>Requests per minute <input type="number" min="1" step="1" placeholder="no limit" ...${field("requests_per_minute")} /></label>
      <label>Tokens per minute <input type="number" min="1" step="1" placeholder="no limit" ...${field("tokens_per_minute")} /></label>
      <label>Requests at a time <input type="number" min="1" step="1" placeholder="no limit" ...${field("concurrency")} /></label></div></fieldset>
    <fieldset class="full"><legend>Models</legend>
      <label class="check"><input type="checkbox" checked=${form.models === null} onChange=${(event) => setForm({ ...form, models: event.target.checked ? null : [] })} /> all models, also future ones</label>
      ${
        form.models !== null &&
        html`<div class="choices">${[...new Set([...names, ...form.models])].map(
          (name) => html`<label key=${name} class="check"><input type="checkbox" checked=${form.models.includes(name)}
        onChange=${(event) => setForm({ ...form, models: event.target.checked ? [...form.models, name] : form.models.filter((one) => one !== name) })} /> <bdi>${name}</bdi></label>`,
        )}</div>`
      }</fieldset>
    ${problem && html`<p class="callout failed full" role="alert" dir="auto">${problem}</p>`}
    <div class="actions end full"><button type="button" class="button" onClick=${onClose}>Cancel</button><button class="button primary" disabled=${busy}>${busy ? "Saving…" : known ? "Save" : "Create key"}</button></div></form></${Dialog}>`;
}

function Secret({ made, onClose }) {
  const [copied, setCopied] = useState(false);
  return html`<${Dialog} title=${`The key ${made.key_id}`} onClose=${() => {
    if (copied) onClose();
  }} className="secret"><div class="body">
    <p>This is the only time that the key is shown. The gateway stores only its hash.</p>
    <div onClick=${(event) => {
      if (event.target.closest("button")) setCopied(true);
    }}><${Code} text=${made.key} title="API key" /></div>
    <label class="check"><input type="checkbox" checked=${copied} onChange=${(event) => setCopied(event.target.checked)} /> I have stored the key</label>
    <div class="actions end"><button type="button" class="button primary" disabled=${!copied} onClick=${onClose}>Done</button></div></div></${Dialog}>`;
}

function Revoke({ known, onClose }) {
  const [state, setState] = useState({ busy: false, error: null });
  const own = session.get()?.key_id === known.key_id;
  const run = async () => {
    setState({ busy: true, error: null });
    try {
      await send(`/api/keys/${encodeURIComponent(known.key_id)}`, { method: "DELETE" });
      toast(`${known.key_id} is revoked.`);
      onClose();
    } catch (error) {
      setState({ busy: false, error });
    }
  };
  return html`<${Dialog} title="Revoke a key" onClose=${onClose}><div class="body">
    <p>All gateways reject <strong><bdi>${known.key_id}</bdi></strong> of ${known.account_id} within a second. Running requests finish. A revoked key cannot be used again, and its name cannot be given to another key.</p>
    ${own && html`<${Notice} title="You are signed in with this key.">Revoking it signs you out.</${Notice}>`}
    ${state.error && html`<${Notice} kind="failed" title="It did not work.">${state.error.message}</${Notice}>`}
    <div class="actions end"><button type="button" class="button" onClick=${onClose}>Cancel</button><button type="button" class="button danger" disabled=${state.busy} onClick=${run}>${state.busy ? "Revoking…" : "Revoke"}</button></div></div></${Dialog}>`;
}
