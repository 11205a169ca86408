// Parts of the dialogs of administrators: their buttons, and the gateway's dry run in words.

import { get } from "./api.js";
import { html, useState, useStore } from "./lib.js";
import { live } from "./live.js";
import { Table } from "./table.js";
import { Badge, Notice } from "./ui.js";

export const useNode = (name) => useStore(live, (state) => state.nodes?.find((node) => node.name === name));
export const encode = (text) => text.split("/").map(encodeURIComponent).join("/");
export const explain = (model, extra = {}) => get(`/api/explain?${new URLSearchParams({ model, ...extra })}`);

// Run an action and close the dialog. A failure stays in the dialog, with its reason.
export function useAction(run, onClose) {
  const [state, setState] = useState({ busy: false, error: null });
  const start = async (...args) => {
    setState({ busy: true, error: null });
    try {
      await run(...args);
      onClose();
    } catch (error) {
      setState({ busy: false, error });
    }
  };
  return [state, start];
}

export function Buttons({ label, busy, danger, disabled, run, onClose }) {
  return html`<div class="actions end"><button type="button" class="button" onClick=${onClose}>Cancel</button>
    <button type="button" class=${`button ${danger ? "danger" : "primary"}`} disabled=${busy || disabled} onClick=${run}>${busy ? "Working…" : label}</button></div>`;
}

export const Gone = ({ name }) =>
  html`<${Notice} kind="failed" title=${`${name} is not in the configuration any more.`}>Nothing can be done with it. Close this dialog.</${Notice}>`;

export function Verdicts({ data, chosen, picked, choose }) {
  const rows = data.candidates.map((one) => ({
    key: one.node,
    kind: one.node === chosen ? "chosen" : "",
    cells: [
      choose
        ? html`<label class="check"><input type="radio" name="node" checked=${one.node === picked} onChange=${() => choose(one.node)} /> <bdi>${one.node}</bdi></label>`
        : html`<bdi>${one.node}</bdi>`,
      html`<span dir="auto">${one.verdict}</span>`,
    ],
  }));
  return html`<${Table} label="Nodes" columns=${[{ title: "Node" }, { title: "What it could do", kind: "lead wrap" }]} rows=${rows} />`;
}

const DECISIONS = { warm: "good", load: "wait", wait: "warned", refuse: "failed" };
const DECISION_WORDS = { warm: "warm", load: "would load", wait: "would wait", refuse: "rejected" };

export function Decision({ data }) {
  return html`<p><${Badge} kind=${DECISIONS[data.decision]}>${DECISION_WORDS[data.decision]}</${Badge}> ${data.node && html`<strong>${data.node}</strong>: `}<span dir="auto">${data.decision === "load" || data.decision === "wait" ? `it ${data.reason}` : data.reason}</span></p>
    ${data.evict.length > 0 && html`<${Notice} title="Other models leave the memory:">${data.evict.join(", ")}</${Notice}>`}`;
}
