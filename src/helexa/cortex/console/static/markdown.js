// Markdown of model output as safe HTML. marked makes the HTML, DOMPurify removes everything that is not text.

import { marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";

const purify = window.DOMPurify;
const LONGEST_FORMULA = 4000; // a longer one is text, so that one forgotten sign does not swallow an answer
const LONGEST_BLOCK = 20_000; // a longer unfinished block is shown as plain text until it ends

const escape = (text) =>
  text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");

// HTML in an answer is shown as text. DOMPurify would remove it, and the reader would not see what the model wrote.
marked.use({ gfm: true, breaks: false, async: false, renderer: { html: ({ text }) => escape(text) } });

// Formulas become elements `code.math`, which `showFormulas` replaces: $..$, \(..\), $$..$$ and \[..\]. A dollar sign
// means an amount of money, not a formula, if a space follows it, if a space precedes the next dollar sign, or if a
// letter or digit follows the next dollar sign.
const FORMULAS = [
  [/^\$\$([^$]{1,4000}?)\$\$/, true],
  [/^\\\[([^]{1,4000}?)\\\]/, true],
  [/^\\\(([^]{1,4000}?)\\\)/, false],
  [/^\$(?![\s$])((?:\\.|[^\\$\n`]){1,1000}?)(?<!\s)\$(?![\w$])/, false],
];
const formulaHtml = (tex, isDisplay) => `<code class="math${isDisplay ? " display" : ""}">${escape(tex.trim())}</code>`;
marked.use({
  extensions: [
    {
      name: "formula",
      level: "inline",
      start: (text) => text.match(/\$|\\[([]/)?.index,
      tokenizer(text) {
        for (const [pattern, isDisplay] of FORMULAS) {
          const match = pattern.exec(text);
          if (match) return { type: "formula", raw: match[0], tex: match[1], isDisplay };
        }
        return undefined;
      },
      renderer: ({ tex, isDisplay }) => formulaHtml(tex, isDisplay),
    },
  ],
});
purify.addHook("afterSanitizeAttributes", (element) => {
  if (element.tagName === "TABLE") element.setAttribute("tabindex", "0"); // a wide table scrolls by keyboard, too
  if (element.tagName !== "A") return;
  element.setAttribute("target", "_blank");
  element.setAttribute("rel", "noopener noreferrer nofollow");
});

const SETTINGS = {
  RETURN_TRUSTED_TYPE: true,
  ALLOWED_TAGS: [
    "a",
    "b",
    "blockquote",
    "br",
    "code",
    "del",
    "em",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "hr",
    "i",
    "kbd",
    "li",
    "ol",
    "p",
    "pre",
    "s",
    "strong",
    "sub",
    "sup",
    "table",
    "tbody",
    "td",
    "th",
    "thead",
    "tr",
    "ul",
  ],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class", "target", "rel"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
};

// Return HTML of a piece of Markdown, safe to insert into the page.
export function toHtml(text) {
  try {
    return purify.sanitize(marked.parse(text), SETTINGS);
  } catch {
    return purify.sanitize(escape(text), SETTINGS);
  }
}

// Return HTML of a formula that stands alone, like `toHtml`.
export const formulaToHtml = (tex) => purify.sanitize(`<p>${formulaHtml(tex, true)}</p>`, SETTINGS);

// Split a text into blocks: {kind: "text" | "code" | "formula" | "plain", text, language, done}. While a text grows, all
// blocks but the last stay equal, so that only the last one is rendered again.
export function blocks(text) {
  const result = [];
  let start = 0,
    fence = null,
    fenceStart = 0,
    formula = null; // a formula of several lines: where it begins, and what ends it
  const lines = /[^\n]*\n?/g;
  let match;
  const pushText = (end) => {
    if (end > start && text.slice(start, end).trim()) result.push({ kind: "text", text: text.slice(start, end) });
  };
  while ((match = lines.exec(text)) && match[0]) {
    const line = match[0],
      begin = match.index,
      end = begin + line.length;
    const opening = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)/.exec(line);
    if (fence) {
      if (opening && opening[1][0] === fence.mark[0] && opening[1].length >= fence.mark.length && !opening[2]) {
        result.push({
          kind: "code",
          language: fence.language,
          text: text.slice(fenceStart, begin).replace(/\n$/, ""),
          done: true,
        });
        fence = null;
        start = end;
      }
    } else if (formula && !opening && begin - formula.start < LONGEST_FORMULA) {
      const close = line.indexOf(formula.close);
      if (close >= 0) {
        result.push({ kind: "formula", text: text.slice(formula.start + 2, begin + close), done: true });
        start = begin + close + 2;
        formula = null;
      }
    } else if (isFormulaStart(line)) {
      pushText(begin);
      formula = { start: begin + line.search(/\S/), close: line.trimStart().startsWith("$$") ? "$$" : "\\]" };
      start = begin;
    } else if (opening) {
      formula = null;
      pushText(begin);
      fence = { mark: opening[1], language: opening[2] };
      fenceStart = end;
    } else if (!line.trim() && begin > start && !/^(\s{2,}|\t)/.test(text.slice(end, end + 2))) {
      pushText(end); // a blank line ends a block, unless an indented line continues it
      start = end;
    }
  }
  if (fence) result.push({ kind: "code", language: fence.language, text: text.slice(fenceStart), done: false });
  else pushText(text.length);
  const last = result.at(-1);
  if (last?.kind === "text" && last.text.length > LONGEST_BLOCK) last.kind = "plain";
  return result;
}

// A line that begins a formula and does not end it.
function isFormulaStart(line) {
  const [, sign, rest] = /^ {0,3}(\$\$|\\\[)(.*)/.exec(line) ?? [];
  return sign !== undefined && !rest.includes(sign === "$$" ? "$$" : "\\]");
}
