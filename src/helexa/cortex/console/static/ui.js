// Parts that several views use: dialogs, menus, messages, badges, bars and buttons.

import { createStore, html, nameParts, useEffect, useRef, useState, useStore } from "./lib.js";

// A modal dialog. `onClose` is called when the user closes it with Escape, the close button or a click outside.
export function Dialog({ title, onClose, children, wide, className = "" }) {
  const ref = useRef(null);
  useEffect(() => {
    const dialog = ref.current,
      before = document.activeElement;
    dialog.showModal();
    return () => {
      dialog.close();
      if (before?.isConnected) before.focus();
    };
  }, []);
  const outside = (event) => {
    if (event.target === ref.current) onClose();
  };
  return html`<dialog ref=${ref} class=${`${wide ? "wide" : ""} ${className}`} aria-label=${title}
    onCancel=${(event) => {
      event.preventDefault();
      onClose();
    }} onMouseDown=${outside}>
    <div class="sheet">
      <div class="head"><h2>${title}</h2><button type="button" class="plain close" aria-label="Close" onClick=${onClose}>✕</button></div>
      ${children}
    </div>
  </dialog>`;
}

// A button with a menu. `items`: {label, run, danger, disabled, hint}, null entries are left out.
export function Menu({ label, items }) {
  const [open, setOpen] = useState(false);
  const ref = useRef(null);
  const entries = items.filter(Boolean);
  useEffect(() => {
    if (!open) return undefined;
    const box = ref.current.querySelector('[role="menu"]');
    if (box.getBoundingClientRect().bottom > innerHeight) box.classList.add("above");
    box.querySelector('[role="menuitem"]')?.focus();
    const close = (event) => {
      if (!ref.current?.contains(event.target)) setOpen(false);
    };
    addEventListener("pointerdown", close);
    return () => removeEventListener("pointerdown", close);
  }, [open]);
  const onKeyDown = (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape" && open) {
      event.stopPropagation();
      setOpen(false);
      ref.current.querySelector("button").focus();
    } else if (step) {
      event.preventDefault();
      if (!open) {
        setOpen(true);
        return;
      }
      const all = [...ref.current.querySelectorAll('[role="menuitem"]')];
      all[(all.indexOf(document.activeElement) + step + all.length) % all.length]?.focus();
    } else if (event.key === "Tab") setOpen(false);
  };
  const choose = (item) => {
    setOpen(false);
    ref.current.querySelector("button").focus();
    item.run();
  };
  return html`<span class="menu" ref=${ref} onKeyDown=${onKeyDown}>
    <button type="button" class="plain" aria-label=${label} title=${label} aria-haspopup="menu" aria-expanded=${open}
      onClick=${() => setOpen(!open)}>⋯</button>
    ${
      open &&
      html`<span class="menu-items" role="menu" aria-label=${label}>${entries.map(
        (item) => html`
      <button type="button" role="menuitem" tabindex="-1" class=${item.danger ? "danger" : ""} onClick=${() => choose(item)}>${item.label}</button>`,
      )}</span>`
    }
  </span>`;
}

// Short messages at the bottom of the page. Errors stay until they are closed.
const toasts = createStore([]);
let toastId = 0;
export function toast(text, { kind = "done", action } = {}) {
  const id = ++toastId;
  toasts.set((all) => [...all.slice(-3), { id, text, kind, action }]);
  if (kind !== "failed") setTimeout(() => dismiss(id), action ? 8000 : 5000);
}
const dismiss = (id) => toasts.set((all) => all.filter((one) => one.id !== id));

export function Toasts() {
  const all = useStore(toasts);
  return html`<div class="toasts" role="status" aria-live="polite">${all.map(
    (one) => html`
    <div key=${one.id} class=${`toast ${one.kind}`}>
      <span dir="auto">${one.text}</span>
      ${
        one.action &&
        html`<button type="button" class="plain" onClick=${() => {
          dismiss(one.id);
          one.action.run();
        }}>${one.action.label}</button>`
      }
      <button type="button" class="plain" aria-label="Dismiss" onClick=${() => dismiss(one.id)}>✕</button>
    </div>`,
  )}</div>`;
}

export function CopyButton({ text, label = "Copy", className = "button small" }) {
  const [state, setState] = useState("");
  const copy = async () => {
    const value = typeof text === "function" ? text() : text;
    setState((await copyText(value)) ? "Copied" : "Press Ctrl+C");
    setTimeout(() => setState(""), 2000);
  };
  return html`<button type="button" class=${className} onClick=${copy}>${state || label}<span class="unseen" role="status">${state}</span></button>`;
}

// Copy a text. The clipboard interface needs https or localhost; elsewhere, select the text of a hidden field.
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = document.createElement("textarea");
    field.value = text;
    field.className = "unseen";
    (document.querySelector("dialog[open]") ?? document.body).append(field);
    field.select();
    const copied = document.execCommand("copy");
    field.remove();
    return copied;
  }
}

// Code with a button that copies it. `markup` is the same code as safe HTML with colors, or null.
export function Code({ text, language = "", title = "", markup = null }) {
  return html`<div class="code"><div class="code-head"><span>${title || language}</span><${CopyButton} text=${text} className="plain small" /></div>
    <pre tabindex="0">${markup ? html`<code key="colored" dangerouslySetInnerHTML=${{ __html: markup }}></code>` : html`<code key="plain">${text}</code>`}</pre></div>`;
}

// A filled bar. `parts`: {share, kind}; `label` says the same in words.
export function Bar({ parts, label }) {
  return html`<span class="meter" role="img" aria-label=${label} title=${label}>${parts.map(
    (part) => html`
    <i class=${part.kind ?? ""} style=${{ width: `${Math.min(100, Math.max(0, part.share * 100)).toFixed(1)}%` }}></i>`,
  )}</span>`;
}

export const Empty = ({ title, children, action }) =>
  html`<div class="nothing"><h3>${title}</h3>${children && html`<p>${children}</p>`}${action}</div>`;

export function Notice({ kind = "notice", title, children, action }) {
  return html`<div class=${`callout ${kind}`} role=${kind === "failed" ? "alert" : "status"}>
    <div>${title && html`<strong dir="auto">${title}</strong>`} <span dir="auto">${children}</span></div>${action}</div>`;
}

export const Badge = ({ kind = "", title, children }) =>
  html`<span class=${`badge ${kind}`} title=${title}>${children}</span>`;

export function ModelName({ id }) {
  const [organization, name] = nameParts(id);
  return html`<bdi class="model-name" title=${id}><span class="soft">${organization}</span><span>${name}</span></bdi>`;
}

// Tiles of figures above a view.
export function Figures({ items }) {
  return html`<dl class="figures">${items.map((item) => html`<div class=${item.kind ?? ""}><dt>${item.label}</dt><dd>${item.value}${item.unit && html`<span class="unit"> ${item.unit}</span>`}</dd></div>`)}</dl>`;
}

// Placeholders of the same height as the content that is loading.
export const Loading = ({ rows = 4, label = "Loading" }) =>
  html`<div class="skeleton" role="status" aria-label=${label}>${Array.from({ length: rows }, () => html`<i></i>`)}</div>`;

export function Failed({ error, retry }) {
  return html`<div class="nothing"><h3>This could not be loaded</h3><p dir="auto">${error.message}</p>
    ${retry && html`<button type="button" class="button" onClick=${retry}>Try again</button>`}</div>`;
}

// Load data with `load`; return {data, error, loading, reload}. Old data stays while new data is loading.
export function useLoad(load, dependencies) {
  const [state, setState] = useState({ data: null, error: null, loading: true });
  const newest = useRef(0);
  const run = async () => {
    const mine = ++newest.current;
    setState((old) => ({ ...old, loading: true }));
    try {
      const data = await load();
      if (mine === newest.current) setState({ data, error: null, loading: false });
    } catch (error) {
      if (mine === newest.current) setState((old) => ({ data: old.data, error, loading: false }));
    }
  };
  useEffect(() => {
    run();
    return () => {
      newest.current += 1;
    };
  }, dependencies);
  return { ...state, reload: run };
}
