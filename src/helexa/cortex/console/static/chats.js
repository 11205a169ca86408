// The current chat of the playground, and the list of chats in this browser.

import { deleteChat, onOtherTab, readChats, writeChat } from "./chat_store.js";
import { useEffect, useLayoutEffect, useRef, useState, useTabState } from "./lib.js";
import { NO_PARAMETERS } from "./parameters.js";
import { toast } from "./ui.js";

const SAVE_MS = 1000;

let lastTurn = 0;

// A number for a turn: the time in milliseconds, or one more than that of the turn before.
export const newTurnId = () => (lastTurn = Math.max(lastTurn + 1, Date.now()));

const newChatId = () => [Date.now(), ...crypto.getRandomValues(new Uint32Array(2))].map((one) => one.toString(36)).join("-");

const newChat = (models, parameters) => ({
  id: newChatId(),
  at: Date.now(),
  title: "",
  panes: models.map((model) => ({ model, turns: [] })),
  parameters,
});

const hasTurns = (chat) => chat.panes.some((pane) => pane.turns.length > 0);

// Streams end when the view closes. The text so far is kept, with an error that the reopened chat shows.
function afterInterruption(chat) {
  const error = { code: "cut", message: "The page was left, or another chat was opened, while the answer streamed." };
  const turns = (pane) =>
    pane.turns.map((turn) => (turn.state === "running" ? { ...turn, state: "failed", error } : turn));
  return {
    ...chat,
    parameters: { ...NO_PARAMETERS, ...chat.parameters },
    panes: chat.panes.map((pane) => ({ ...pane, turns: turns(pane) })),
  };
}

// Return the current chat, the list of chats (newest first), why the current chat is not stored ("" if it is), and
// functions that change them. The chat is stored a moment after each change. This tab remembers which chat is current.
export function useChats(account) {
  const [chats, setChats] = useState(() => readChats(account));
  const [tab, setTab] = useTabState(`current:${account}`, { id: "", models: [""], parameters: NO_PARAMETERS });
  const [chat, setChat] = useState(() => {
    const stored = chats.find((one) => one.id === tab.id);
    return stored ? afterInterruption(stored) : newChat(tab.models, tab.parameters);
  });
  const [problem, setProblem] = useState("");
  const latest = useRef(chat),
    saved = useRef(chat),
    timer = useRef(null);
  latest.current = chat;

  const save = () => {
    clearTimeout(timer.current);
    timer.current = null;
    if (saved.current === latest.current || !hasTurns(latest.current)) return;
    saved.current = latest.current;
    const changed = { ...latest.current, at: Date.now() };
    setProblem(writeChat(account, changed));
    setChats((all) => [changed, ...all.filter((one) => one.id !== changed.id)]);
  };
  useLayoutEffect(() => {
    if (saved.current !== chat) timer.current ??= setTimeout(save, SAVE_MS);
    setTab({ id: chat.id, models: chat.panes.map((pane) => pane.model), parameters: chat.parameters });
  }, [chat]);
  useEffect(() => {
    addEventListener("pagehide", save);
    const end = onOtherTab(account, () => setChats(readChats(account)));
    return () => {
      removeEventListener("pagehide", save);
      end();
      save();
    };
  }, []);

  const show = (next) => {
    save();
    setProblem("");
    saved.current = next;
    setChat(next);
  };
  const start = (models = chat.panes.map((pane) => pane.model)) => show(newChat(models, chat.parameters));
  const open = (stored) => show(afterInterruption(stored));
  const rename = (one, title) => {
    if (one.id === chat.id) setChat((old) => ({ ...old, title }));
    else {
      const renamed = { ...one, title };
      writeChat(account, renamed);
      setChats((all) => all.map((other) => (other.id === one.id ? renamed : other)));
    }
  };
  const remove = (gone, words) => {
    const current = gone.find((one) => one.id === chat.id);
    if (current) {
      saved.current = latest.current; // a deleted chat is not stored again
      show(newChat(chat.panes.map((pane) => pane.model), chat.parameters));
    }
    for (const one of gone) deleteChat(account, one.id);
    const before = chats;
    setChats((all) => all.filter((one) => !gone.includes(one)));
    const undo = () => {
      for (const one of gone) writeChat(account, one);
      setChats(before);
      if (current) open(current);
    };
    toast(words, { action: { label: "Undo", run: undo } });
  };
  return {
    chat,
    chats,
    problem,
    setPanes: (change) =>
      setChat((old) => {
        const panes = change(old.panes);
        return panes === old.panes ? old : { ...old, panes };
      }),
    setParameters: (parameters) => setChat((old) => ({ ...old, parameters })),
    start,
    open,
    rename,
    remove: (one) => remove([one], "The chat is deleted."),
    removeAll: () => remove(chats, "All chats are deleted."),
  };
}
