// The playground: chat with one model, or with two models side by side.

import { useAnswers } from "./answers.js";
import { get, session } from "./api.js";
import { ChatList } from "./chat_list.js";
import { messagesOf, readParameters } from "./chat_request.js";
import { newTurnId, useChats } from "./chats.js";
import { asCurl, asPython } from "./code_samples.js";
import { Composer } from "./composer.js";
import { html, useEffect, useMemo, useState, useTabState } from "./lib.js";
import { Pane } from "./pane.js";
import { Parameters } from "./parameters.js";
import { Code, Dialog, Empty, Failed, Loading, Notice, toast, useLoad } from "./ui.js";

const NARROW = matchMedia("(max-width: 1000px)"); // panels beside the chat become sheets
const ROOM_FOR_LIST = 1200;
const LIST = "chat-list"; // key in the browser's storage: whether the user left the list beside the chat open

export default function Playground({ query }) {
  const account = session.get()?.account_id ?? "";
  const models = useLoad(() => get("/v1/models"), []);
  const all = useChats(account);
  const { panes, parameters } = all.chat;
  const [draft, setDraft] = useTabState(`draft:${account}`, "");
  const [images, setImages] = useState([]);
  const narrow = useNarrow();
  const [showsList, setShowsList] = useState(listIsOpen);
  const [showsParameters, setShowsParameters] = useState(false);
  useEffect(() => {
    if (!narrow) return;
    setShowsList(false); // two sheets would cover each other
    setShowsParameters(false);
  }, [narrow]);
  const [sample, setSample] = useState(null);
  const list = models.data?.data ?? [];
  const [problem, extra] = useMemo(() => readParameters(parameters), [parameters]);
  const modelOf = (pane) => list.find((one) => one.id === pane.model);
  const seesImages = (pane) => Boolean(modelOf(pane)?.capabilities?.includes("vision"));
  const bodyFor = (pane, turns) => ({
    model: pane.model,
    messages: messagesOf(parameters.system, turns, seesImages(pane)),
    stream: true,
    stream_options: { include_usage: true },
    ...extra,
  });
  const { running, actions } = useAnswers(panes, all.setPanes, bodyFor);
  const busy = Object.values(running).some(Boolean);
  const choose = (index, model) =>
    all.setPanes((old) => old.map((pane, place) => (place === index ? { ...pane, model } : pane)));

  const asked = query.get("model");
  useEffect(() => {
    if (!asked) return;
    if (panes[0].turns.length) all.start([asked]);
    else choose(0, asked);
    history.replaceState(null, "", "#/playground");
  }, [asked]);
  useEffect(() => {
    if (!list.length || panes.every((pane) => pane.model)) return;
    const first = (list.find((one) => one.state === "warm" && !/embed/i.test(one.id)) ?? list[0]).id;
    all.setPanes((old) => old.map((pane) => (pane.model ? pane : { ...pane, model: first })));
  }, [models.data, all.chat.id]);

  const submit = () => {
    if (busy || problem || !(draft.trim() || images.length)) return;
    const turn = { role: "user", text: draft, images, at: newTurnId() };
    setDraft("");
    setImages([]);
    panes.forEach((pane, index) => actions.run(index, [...pane.turns, turn]));
  };
  const compare = () => {
    const other = list.filter((one) => one.id !== panes[0].model);
    const model = (other.find((one) => one.state === "warm") ?? other[0])?.id ?? panes[0].model;
    if (panes.length === 1) all.setPanes((old) => [...old, { model, turns: [] }]);
    else {
      if (panes[1].turns.length)
        toast("The second conversation is removed.", { action: { label: "Undo", run: () => all.setPanes(() => panes) } });
      all.setPanes((old) => [old[0]]);
    }
  };
  const toggleList = () => {
    setShowsList(!showsList);
    if (!narrow) rememberList(!showsList);
  };
  const leave = (next) => {
    actions.stopAll();
    next();
    if (narrow) setShowsList(false);
  };
  const show = (pane) => {
    const turns = pane.turns.filter((turn) => turn.state !== "running" && turn.state !== "failed");
    const pending =
      draft.trim() || turns.length === 0 ? [...turns, { role: "user", text: draft.trim() || "Hello", images }] : turns;
    setSample(bodyFor(pane, pending.at(-1).role === "assistant" ? pending.slice(0, -1) : pending));
  };
  const useExample = (text) => {
    setDraft(text);
    document.getElementById("prompt")?.focus();
  };

  if (models.error && !models.data) return html`<${Failed} error=${models.error} retry=${models.reload} />`;
  if (!models.data) return html`<${Loading} label="Loading the models" />`;
  if (!list.length)
    return html`<section class="card"><${Empty} title="No models">This gateway has no model that this key may use. Load a model in Fleet, or add one to the catalog.</${Empty}></section>`;
  return html`
    <div class="title"><h1>Playground</h1><div class="tools">
      <button type="button" class="button" aria-expanded=${showsList} onClick=${toggleList}>Chats</button>
      <button type="button" class="button" aria-pressed=${panes.length === 2} onClick=${compare} disabled=${busy}>Compare</button>
      <button type="button" class="button" aria-expanded=${showsParameters} onClick=${() => setShowsParameters(!showsParameters)}>Parameters${Object.keys(extra).length || parameters.system ? " •" : ""}</button>
      <button type="button" class="button" onClick=${() => leave(() => all.start())} disabled=${!panes.some((pane) => pane.turns.length)}>New chat</button></div></div>
    <div class=${`play ${showsList && !narrow ? "with-list" : ""} ${showsParameters && !narrow ? "with-parameters" : ""}`}>
      ${showsList && html`<${Panel} title="Chats" narrow=${narrow} onClose=${() => setShowsList(false)}><${ChatList} chats=${all.chats} current=${all.chat.id} open=${(chat) => leave(() => all.open(chat))} rename=${all.rename} remove=${(chat) => (chat.id === all.chat.id ? leave(() => all.remove(chat)) : all.remove(chat))} removeAll=${() => leave(all.removeAll)} /></${Panel}>`}
      <div class="play-main">
        ${all.problem && html`<${Notice}>${all.problem}</${Notice}>`}
        <div class=${`panes count-${panes.length}`}>${panes.map(
          (pane, index) => html`<${Pane} key=${`${all.chat.id}${index}`} index=${index} pane=${pane} models=${list} model=${modelOf(pane)} running=${running[index]}
            choose=${(model) => choose(index, model)} show=${() => show(pane)} actions=${actions} useExample=${index === 0 && useExample} />`,
        )}</div>
        <${Composer} draft=${draft} setDraft=${setDraft} images=${images} setImages=${setImages} sees=${panes.some(seesImages)} busy=${busy} submit=${submit} stop=${actions.stopAll} problem=${problem} />
        <p class="unseen" role="status">${busy ? "Answering…" : panes.some((pane) => pane.turns.at(-1)?.role === "assistant") ? "The answer is complete." : ""}</p></div>
      ${showsParameters && html`<${Panel} title="Parameters" narrow=${narrow} onClose=${() => setShowsParameters(false)}><${Parameters} account=${account} value=${parameters} set=${all.setParameters} problem=${problem} reasons=${panes.some((pane) => modelOf(pane)?.reasoning)} /></${Panel}>`}
    </div>
    ${sample && html`<${Sample} body=${sample} onClose=${() => setSample(null)} />`}`;
}

// What is beside the chat on wide screens, and in a sheet over the chat on narrow ones.
function Panel({ title, narrow, onClose, children }) {
  return narrow
    ? html`<${Dialog} title=${title} onClose=${onClose} className="edge"><div class="body">${children}</div></${Dialog}>`
    : html`<aside class="card panel" aria-label=${title}>${children}</aside>`;
}

function useNarrow() {
  const [narrow, setNarrow] = useState(NARROW.matches);
  useEffect(() => {
    const change = () => setNarrow(NARROW.matches);
    NARROW.addEventListener("change", change);
    return () => NARROW.removeEventListener("change", change);
  }, []);
  return narrow;
}

function listIsOpen() {
  try {
    return !NARROW.matches && (localStorage.getItem(LIST) ?? (innerWidth >= ROOM_FOR_LIST ? "open" : "")) === "open";
  } catch {
    return innerWidth >= ROOM_FOR_LIST;
  }
}

function rememberList(open) {
  try {
    localStorage.setItem(LIST, open ? "open" : "closed");
  } catch {
    /* blocked or full: the list is as at first when the page is opened again */
  }
}

function Sample({ body, onClose }) {
  const [kind, setKind] = useState("curl");
  const needsKey = session.get()?.require_auth;
  const text = kind === "curl" ? asCurl(body, location.origin, needsKey) : asPython(body, location.origin, needsKey);
  return html`<${Dialog} title="This request as code" onClose=${onClose} wide><div class="body">
    <div class="segments" role="group" aria-label="Language">${["curl", "Python"].map((one) => html`<button type="button" aria-pressed=${kind === one} onClick=${() => setKind(one)}>${one}</button>`)}</div>
    <${Code} text=${text} title=${kind} />
    ${needsKey && html`<p class="soft small">Set the environment variable HELEXA_API_KEY to your key. The key of this session is not shown.</p>`}</div></${Dialog}>`;
}
