// The list of chats beside the playground: search, open, rename, export and delete.

import { day, html, useMemo, useState } from "./lib.js";
import { Dialog, Menu } from "./ui.js";

const LONGEST_TITLE = 60;

// The title of a chat: the name that the user gave, or the beginning of the first message.
export function titleOf(chat) {
  if (chat.title) return chat.title;
  const text = chat.panes[0].turns.find((turn) => turn.role === "user")?.text.trim().replace(/\s+/g, " ") ?? "";
  return (text.length > LONGEST_TITLE ? `${text.slice(0, LONGEST_TITLE)}…` : text) || "New chat";
}

export function ChatList({ chats, current, open, rename, remove, removeAll }) {
  const [words, setWords] = useState("");
  const [renamed, setRenamed] = useState(null);
  const wanted = words.trim().toLowerCase();
  const visible = useMemo(() => (wanted ? chats.filter((chat) => textOf(chat).includes(wanted)) : chats), [chats, wanted]);
  return html`<div class="chats">
    <div class="chats-head"><label class="unseen" for="chat-search">Search chats</label>
      <input id="chat-search" type="search" placeholder="Search chats" value=${words} onInput=${(event) => setWords(event.target.value)} />
      ${chats.length > 0 && html`<${Menu} label="Actions for all chats" items=${[
        { label: "Export all", run: () => exportAll(chats) },
        { label: "Delete all", run: removeAll, danger: true },
      ]} />`}</div>
    ${
      visible.length
        ? html`<ul>${visible.map(
            (chat) => html`<li key=${chat.id} class=${chat.id === current ? "current" : ""}>
        <button type="button" class="chat-name" title=${titleOf(chat)} aria-current=${chat.id === current ? "true" : undefined} onClick=${() => open(chat)}><bdi>${titleOf(chat)}</bdi><span class="soft">${when(chat.at)}</span></button>
        <${Menu} label=${`Actions for chat ${titleOf(chat)}`} items=${[
          { label: "Rename…", run: () => setRenamed(chat) },
          { label: "Export as Markdown", run: () => download(`${fileName(chat)}.md`, asMarkdown(chat), "text/markdown") },
          { label: "Export as JSON", run: () => download(`${fileName(chat)}.json`, JSON.stringify(chat, null, 2), "application/json") },
          { label: "Delete", run: () => remove(chat), danger: true },
        ]} /></li>`,
          )}</ul>`
        : html`<p class="empty small">${wanted ? `No chat contains “${words}”.` : "No chats yet."}</p>`
    }
    <p class="soft small">Only this browser keeps the chats: the newest 200, without large images.</p>
    ${renamed && html`<${Rename} chat=${renamed} rename=${rename} onClose=${() => setRenamed(null)} />`}</div>`;
}

function Rename({ chat, rename, onClose }) {
  const [title, setTitle] = useState(titleOf(chat));
  return html`<${Dialog} title="Rename the chat" onClose=${onClose}><form class="body form" onSubmit=${(event) => {
    event.preventDefault();
    rename(chat, title.trim());
    onClose();
  }}><label>Title <input autofocus maxlength="120" value=${title} onInput=${(event) => setTitle(event.target.value)} /></label>
    <p class="soft small">Without a title, the chat has the beginning of its first message.</p>
    <div class="actions"><button class="button primary">Rename</button></div></form></${Dialog}>`;
}

// The time of the last change: the time of day if it was today, else the date.
function when(at) {
  const date = new Date(at);
  return day(at) === day(Date.now())
    ? `${String(date.getHours()).padStart(2, "0")}:${String(date.getMinutes()).padStart(2, "0")}`
    : day(at);
}

const textOf = (chat) =>
  [titleOf(chat), ...chat.panes.flatMap((pane) => pane.turns.map((turn) => turn.text ?? ""))].join("\n").toLowerCase();

const fileName = (chat) => `helexa-${titleOf(chat).replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "chat"}`;

const HEADINGS = { user: "You", tool: "Tool result" };

function asMarkdown(chat) {
  const parts = [`# ${titleOf(chat)}\n`];
  if (chat.parameters?.system) parts.push(`System prompt: ${chat.parameters.system}\n`);
  for (const pane of chat.panes) {
    if (chat.panes.length > 1) parts.push(`# ${pane.model}\n`);
    for (const turn of pane.turns) {
      parts.push(`## ${HEADINGS[turn.role] ?? turn.model}\n\n${turn.text}\n`);
      for (const call of turn.calls ?? []) parts.push(`Tool call: \`${call.name}(${call.arguments})\`\n`);
    }
  }
  return parts.join("\n");
}

const exportAll = (chats) => download("helexa-chats.json", JSON.stringify(chats, null, 2), "application/json");

function download(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
