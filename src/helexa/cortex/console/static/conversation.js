// The turns of a conversation: questions, answers with their speed, reasoning, tool calls and tool results.

import { speed } from "./chat.js";
import { compact, duration, html, memo, plural, rate, useState } from "./lib.js";
import { blocks, toHtml } from "./markdown.js";
import { Code, CopyButton, Notice } from "./ui.js";

export const Turn = memo(function Turn({ turn, running, retry, answerCalls, stop }) {
  if (turn.role === "user")
    return html`<article class="turn user" aria-label="You"><div class="bubble" dir="auto">${turn.text}</div>
    ${turn.images?.length > 0 && html`<div class="thumbs">${turn.images.map((image) => html`<img src=${image.url} alt=${image.name} />`)}</div>`}</article>`;
  if (turn.role === "tool")
    return html`<article class="turn tool" aria-label="Tool result"><span class="soft small">Result of ${turn.name}</span><pre tabindex="0" dir="auto">${turn.text}</pre></article>`;
  const live = turn.state === "running";
  return html`<article class="turn assistant" aria-label="Answer" aria-busy=${live}>
    ${turn.reasoning && html`<details class="thinking" open=${live && !turn.text}><summary>Reasoning${live && !turn.text ? "…" : ""} <span class="soft">${plural(turn.reasoning.length, "character")}</span></summary><div class="reasoning" dir="auto">${turn.reasoning}</div></details>`}
    <${Markdown} text=${turn.text} />
    ${turn.calls?.map((call) => html`<div class="call"><span class="badge">tool call</span> <b>${call.name}</b><pre tabindex="0" dir="auto">${pretty(call.arguments)}</pre></div>`)}
    ${live && !turn.text && !turn.reasoning && html`<p class="soft waiting">${waitingWords(turn.progress)}</p>`}
    ${turn.error && html`<${Notice} kind="failed" title=${turn.text || turn.reasoning ? "The answer is incomplete." : "There is no answer."}>${turn.error.message}</${Notice}>`}
    ${turn.finish === "length" && html`<p class="soft small">The answer reached the output limit.</p>`}
    <${TurnFoot} turn=${turn} live=${live} running=${running} retry=${retry} stop=${stop} />
    ${!live && turn.finish === "tool_calls" && !running && html`<${ToolResults} turn=${turn} answerCalls=${answerCalls} />`}
  </article>`;
});

const waitingWords = (progress) =>
  !progress
    ? "Waiting for the first token…"
    : /load/.test(progress)
      ? `The model is ${progress}…`
      : "The node is reading the prompt…";

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function TurnFoot({ turn, live, running, retry, stop }) {
  const { first, rate: perSecond, tokens } = speed(turn);
  const words = [
    turn.state === "stopped" && "stopped",
    first != null && `first token ${duration(first)}`,
    perSecond != null && `${rate(perSecond)} tok/s`,
    tokens != null && plural(tokens, "token"),
    turn.usage?.prompt_tokens_details?.cached_tokens > 0 &&
      `${compact(turn.usage.prompt_tokens_details.cached_tokens)} of ${compact(turn.usage.prompt_tokens)} prompt tokens cached`,
    turn.usage?.completion_tokens_details?.reasoning_tokens > 0 &&
      `${compact(turn.usage.completion_tokens_details.reasoning_tokens)} for reasoning`,
  ].filter(Boolean);
  const node = /node=([^;]+)/.exec(turn.route ?? "")?.[1];
  return html`<div class="turn-foot"><span class="small soft">${[turn.model, node && `on ${node}`, ...words].filter(Boolean).join(" · ")}</span>
    ${
      live
        ? html`<button type="button" class="plain small" onClick=${stop}>Stop</button>`
        : html`${turn.text && html`<${CopyButton} text=${turn.text} className="plain small" />`}
        ${!running && html`<button type="button" class="plain small" onClick=${() => retry(turn.at)}>${turn.error ? "Try again" : "Answer again"}</button>`}`
    }</div>`;
}

function ToolResults({ turn, answerCalls }) {
  const [results, setResults] = useState(turn.calls.map(() => ""));
  return html`<form class="form results" onSubmit=${(event) => {
    event.preventDefault();
    answerCalls(turn.at, results);
  }}>
    ${turn.calls.map((call, position) => html`<label>Result of ${call.name} <textarea rows="2" required dir="auto" value=${results[position]} onInput=${(event) => setResults(results.map((old, at) => (at === position ? event.target.value : old)))}></textarea></label>`)}
    <div class="actions"><button class="button">Send ${plural(turn.calls.length, "result")}</button></div></form>`;
}

const Markdown = memo(function Markdown({ text }) {
  return html`<div class="markdown" dir="auto">${blocks(text).map((block, index) =>
    block.kind === "code"
      ? html`<${CodeBlock} key=${index} text=${block.text} language=${block.language} />`
      : block.kind === "plain"
        ? html`<p key=${index} class="plain-text" dir="auto">${block.text}</p>`
        : html`<${TextBlock} key=${index} text=${block.text} />`,
  )}</div>`;
});
const CodeBlock = memo(({ text, language }) => html`<${Code} text=${text} language=${language} />`);
const TextBlock = memo(
  ({ text }) => html`<div class="block" dir="auto" dangerouslySetInnerHTML=${{ __html: toHtml(text) }}></div>`,
);
