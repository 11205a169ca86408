// The chats and presets of an account, in this browser's storage. All sizes are bounded, and the oldest chats go first.

const MOST_CHATS = 200;
const MOST_CHARS = 3_000_000; // of all chats; browsers store about 5 million characters per site
const LONGEST_CHAT = 1_000_000;
const LONGEST_IMAGE = 60_000; // the data of larger images is not stored
const MOST_PRESETS = 50;
const LONGEST_PRESET = 20_000;
const CHATS = "helexa-chat:";
const PRESETS = "helexa-presets:";

// The storage that works: the browser's, else the tab's, else none. A full storage works, because old chats can be deleted.
function usable() {
  for (const name of ["localStorage", "sessionStorage"]) {
    try {
      const one = window[name];
      try {
        one.setItem("helexa-probe", "1");
        one.removeItem("helexa-probe");
      } catch (error) {
        if (!one.length) throw error;
      }
      return one;
    } catch {
      /* blocked, as in some private modes */
    }
  }
  return null;
}

let found; // undefined: not looked for yet
const storage = () => (found === undefined ? (found = usable()) : found);

const keyOf = (account, id) => `${CHATS}${encodeURIComponent(account)}:${id}`;
const isKeyOf = (account, key) => key.startsWith(`${CHATS}${encodeURIComponent(account)}:`);

// All stored chats of all accounts as {key, at, size}, oldest first. A stored text begins with the time of its change.
function entries() {
  const result = [];
  for (let index = 0; index < storage().length; index += 1) {
    const key = storage().key(index);
    if (!key.startsWith(CHATS)) continue;
    const text = storage().getItem(key) ?? "";
    result.push({ key, at: Number(/^\{"at":(\d+)/.exec(text)?.[1] ?? 0), size: text.length });
  }
  return result.sort((a, b) => a.at - b.at);
}

// The chats of an account, newest first: {id, at, title, panes, parameters}. A text that is no chat is left out.
export function readChats(account) {
  if (!storage()) return [];
  const chats = [];
  for (const { key } of entries()) {
    if (!isKeyOf(account, key)) continue;
    try {
      const chat = JSON.parse(storage().getItem(key));
      if (Array.isArray(chat.panes) && chat.panes.every((pane) => Array.isArray(pane.turns))) chats.unshift(chat);
    } catch {
      /* written by something else */
    }
  }
  return chats;
}

// Store a chat. Returns "" or why the chat is not stored. Makes room by deleting the chats that changed longest ago.
export function writeChat(account, chat) {
  if (!storage()) return "This browser stores nothing for this page, so the chat is lost when the tab is closed.";
  const key = keyOf(account, chat.id);
  let text = storedText(chat, LONGEST_IMAGE);
  if (text.length > LONGEST_CHAT) text = storedText(chat, 0);
  if (text.length > LONGEST_CHAT) {
    return "The chat is too long to be kept in this browser. Export it to keep it.";
  }
  const others = entries().filter((one) => one.key !== key);
  let size = others.reduce((sum, one) => sum + one.size, 0);
  const forget = () => {
    const oldest = others.shift();
    storage().removeItem(oldest.key);
    size -= oldest.size;
  };
  while (others.length && (others.length >= MOST_CHATS || size + text.length > MOST_CHARS)) forget();
  while (true) {
    try {
      storage().setItem(key, text);
      return "";
    } catch {
      if (!others.length) return "The storage of this browser is full, so the chat is lost when the tab is closed.";
      forget();
    }
  }
}

function storedText({ id, at, title, panes, parameters }, longestImage) {
  const smaller = (image) => (image.url.length > longestImage ? { ...image, url: "" } : image);
  const turns = (pane) =>
    pane.turns.map((turn) => (turn.images?.length ? { ...turn, images: turn.images.map(smaller) } : turn));
  return JSON.stringify({ at, id, title, panes: panes.map((pane) => ({ ...pane, turns: turns(pane) })), parameters });
}

export function deleteChat(account, id) {
  storage()?.removeItem(keyOf(account, id));
}

// Call `changed` when another tab changes the chats of an account. Returns a function that ends these calls.
export function onOtherTab(account, changed) {
  const listener = (event) => {
    if (event.key === null || isKeyOf(account, event.key)) changed();
  };
  addEventListener("storage", listener);
  return () => removeEventListener("storage", listener);
}

// The presets of an account: {name, parameters}.
export function readPresets(account) {
  try {
    const presets = JSON.parse(storage()?.getItem(PRESETS + account) ?? "[]");
    return presets.filter((one) => typeof one.name === "string" && typeof one.parameters === "object");
  } catch {
    return [];
  }
}

// Store presets. Returns "" or why they are not stored.
export function writePresets(account, presets) {
  if (presets.length > MOST_PRESETS) return `There are ${MOST_PRESETS} presets already. Delete one first.`;
  if (presets.some((one) => JSON.stringify(one).length > LONGEST_PRESET)) return "The preset is too long.";
  try {
    if (!storage()) throw new Error("no storage");
    storage().setItem(PRESETS + account, JSON.stringify(presets));
    return "";
  } catch {
    return "This browser cannot store the preset.";
  }
}
