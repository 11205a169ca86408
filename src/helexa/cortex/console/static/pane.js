// One pane of the playground: a model and its conversation.

import { Turn } from "./conversation.js";
import { context, html, useLayoutEffect, useRef } from "./lib.js";
import { Empty } from "./ui.js";

const STATE_WORDS = {
  warm: "warm",
  loading: "loading",
  recovering: "recovering",
  sleeping: "sleeping: wakes first",
  cold: "cold: loads first",
  unreachable: "unreachable: its node is down",
};
const EXAMPLES = [
  "Explain how a hash table works, in five sentences.",
  "Write a Python function that returns the longest word of a text, with a test.",
  "Write a short, friendly e-mail that moves a meeting to Friday at 10.",
  "Solve x² − 5x + 6 = 0 step by step, with formulas.",
];

export function Pane({ index, pane, models, model, running, choose, show, actions, useExample }) {
  const scroller = useRef(null),
    pinned = useRef(true);
  useLayoutEffect(() => {
    if (pinned.current && scroller.current) scroller.current.scrollTop = scroller.current.scrollHeight;
  });
  const onScroll = () => {
    const box = scroller.current;
    pinned.current = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  };
  const id = `model-${index}`;
  return html`<section class="card pane" aria-label=${`Chat with ${pane.model}`}>
    <div class="pane-head"><label class="unseen" for=${id}>Model</label>
      <select id=${id} value=${pane.model} disabled=${running} onChange=${(event) => choose(event.target.value)}>
        ${!model && pane.model && html`<option value=${pane.model}>${pane.model} (not available)</option>`}
        ${models.map((one) => html`<option key=${one.id} value=${one.id}>${one.id}${one.state === "warm" ? "" : ` (${one.state})`}</option>`)}</select>
      <span class="soft small">${model ? [STATE_WORDS[model.state], model.limit && `${context(model.limit.context)} context`, model.capabilities.includes("vision") && "sees images"].filter(Boolean).join(" · ") : "not available"}</span>
      <button type="button" class="plain small" onClick=${show}>Copy as code</button></div>
    <div class="turns" ref=${scroller} onScroll=${onScroll} tabindex="0" role="log" aria-live="off" aria-label="Conversation">
      ${
        pane.turns.length
          ? pane.turns.map(
              (turn) =>
                html`<${Turn} key=${`${turn.role}${turn.at}`} turn=${turn} index=${index} running=${Boolean(running)} actions=${actions} />`,
            )
          : html`<${Empty} title="Start a conversation" action=${useExample && html`<div class="examples">${EXAMPLES.map((text) => html`<button type="button" key=${text} onClick=${() => useExample(text)}>${text}</button>`)}</div>`}>The answer streams here, with its speed. Nothing is stored on the gateway.</${Empty}>`
      }
    </div></section>`;
}
