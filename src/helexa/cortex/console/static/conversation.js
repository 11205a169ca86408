// The turns of a conversation: questions, answers with their speed, reasoning, tool calls and tool results.

import { speed } from "./chat.js";
import { colored, loadColors, needsColors } from "./code_colors.js";
import { compact, duration, html, memo, plural, rate, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./lib.js";
import { blocks, formulaToHtml, toHtml } from "./markdown.js";
import { loadMath, needsMath, showFormulas } from "./math.js";
import { Code, CopyButton, Notice } from "./ui.js";

export const Turn = memo(function Turn({ turn, index, running, actions }) {
  if (turn.role === "user") return html`<${Message} turn=${turn} index=${index} running=${running} actions=${actions} />`;
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
    <${TurnFoot} turn=${turn} live=${live} running=${running} retry=${() => actions.retry(index, turn.at)} stop=${() => actions.stop(index)} />
    ${!live && turn.finish === "tool_calls" && !running && html`<${ToolResults} turn=${turn} send=${(results) => actions.answerCalls(index, turn.at, results)} />`}
  </article>`;
});

// A message of the user. Its text can be edited and sent again, which removes the messages after it.
function Message({ turn, index, running, actions }) {
  const [text, setText] = useState(null); // the edited text, or null
  const send = () => {
    if (!text.trim()) return;
    setText(null);
    actions.edit(index, turn.at, text);
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    } else if (event.key === "Escape") setText(null);
  };
  return html`<article class="turn user" aria-label="You">
    ${
      text === null
        ? html`<div class="bubble" dir="auto">${turn.text}</div>`
        : html`<form class="form edit" onSubmit=${(event) => {
            event.preventDefault();
            send();
          }}><label class="full"><span class="unseen">Edited message</span><textarea rows=${Math.min(12, text.split("\n").length + 1)} dir="auto" ref=${focusOnce} value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${onKeyDown}></textarea></label>
        <div class="actions end full"><button type="button" class="button small" onClick=${() => setText(null)}>Cancel</button><button class="button small primary" disabled=${!text.trim()}>Ask again</button></div></form>`
    }
    ${turn.images?.length > 0 && html`<div class="thumbs">${turn.images.map((image) => (image.url ? html`<img src=${image.url} alt=${image.name} />` : html`<span class="soft small">${image.name}: too large to be kept</span>`))}</div>`}
    ${text === null && !running && html`<div class="message-foot"><${CopyButton} text=${turn.text} className="plain small" /><button type="button" class="plain small" onClick=${() => setText(turn.text)}>Edit</button></div>`}</article>`;
}

const focusOnce = (element) => element?.focus();

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
    perSecond != null && `${live ? "≈ " : ""}${rate(perSecond)} tok/s`,
    tokens != null && !live && plural(tokens, "token"),
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
        ${!running && html`<button type="button" class="plain small" onClick=${retry}>${turn.error ? "Try again" : "Answer again"}</button>`}`
    }</div>`;
}

function ToolResults({ turn, send }) {
  const [results, setResults] = useState(turn.calls.map(() => ""));
  return html`<form class="form results" onSubmit=${(event) => {
    event.preventDefault();
    send(results);
  }}>
    ${turn.calls.map((call, position) => html`<label>Result of ${call.name} <textarea rows="2" required dir="auto" value=${results[position]} onInput=${(event) => setResults(results.map((old, at) => (at === position ? event.target.value : old)))}></textarea></label>`)}
    <div class="actions"><button class="button">Send ${plural(turn.calls.length, "result")}</button></div></form>`;
}

const Markdown = memo(function Markdown({ text }) {
  return html`<div class="markdown" dir="auto">${blocks(text).map((block, index) =>
    block.kind === "code"
      ? html`<${CodeBlock} key=${index} text=${block.text} language=${block.language} done=${block.done} />`
      : block.kind === "plain"
        ? html`<p key=${index} class="plain-text" dir="auto">${block.text}</p>`
        : html`<${TextBlock} key=${index} text=${block.text} toHtml=${block.kind === "formula" ? formulaToHtml : toHtml} />`,
  )}</div>`;
});

const LONGEST_LIVE_CODE = 8000; // longer code gets its colors when it is complete

const CodeBlock = memo(function CodeBlock({ text, language, done }) {
  const waits = useLoaded(language && needsColors(language), () => loadColors(language));
  const markup = useMemo(
    () => (language && !waits && (done || text.length < LONGEST_LIVE_CODE) ? colored(text, language) : null),
    [text, language, done, waits],
  );
  return html`<${Code} text=${text} language=${language} markup=${markup} />`;
});

const TextBlock = memo(function TextBlock({ text, toHtml: convert }) {
  const block = useRef(null);
  const markup = useMemo(() => convert(text), [text, convert]);
  const hasMath = String(markup).includes('<code class="math');
  const waits = useLoaded(hasMath && needsMath(), loadMath);
  useLayoutEffect(() => {
    if (hasMath) showFormulas(block.current);
  }, [markup, waits]);
  return html`<div class="block" dir="auto" ref=${block} dangerouslySetInnerHTML=${{ __html: markup }}></div>`;
});

// Load a library if it is missing, and render the component again. Return whether the library is still missing.
function useLoaded(isMissing, load) {
  const [, rerender] = useState(0);
  useEffect(() => {
    let mounted = true;
    if (isMissing)
      load().then(
        () => mounted && rerender((count) => count + 1),
        () => {}, // without the library, the text stays as it is
      );
    return () => {
      mounted = false;
    };
  }, [isMissing]);
  return isMissing;
}
