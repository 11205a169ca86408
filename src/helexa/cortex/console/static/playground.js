// The playground: chat with one model, or with two models side by side.

import { get, session } from "./api.js";
import { ask } from "./chat.js";
import { messagesOf, readParameters } from "./chat_request.js";
import { asCurl, asPython } from "./code_samples.js";
import { Composer } from "./composer.js";
import { Turn } from "./conversation.js";
import { context, html, useEffect, useLayoutEffect, useMemo, useRef, useState, useTabState } from "./lib.js";
import { Code, Dialog, Empty, Failed, Loading, toast, useLoad } from "./ui.js";

const NO_PARAMETERS = {
  system: "",
  temperature: "",
  top_p: "",
  max_tokens: "",
  seed: "",
  stop: "",
  thinking: "",
  tools: "",
};

export default function Playground({ query }) {
  const account = session.get()?.account_id ?? "";
  const models = useLoad(() => get("/v1/models"), []);
  const [panes, setPanes] = useTabState(`chat:${account}`, [{ model: "", turns: [] }]);
  const [parameters, setParameters] = useTabState(`parameters:${account}`, NO_PARAMETERS);
  const [draft, setDraft] = useTabState(`draft:${account}`, "");
  const [images, setImages] = useState([]);
  const [settings, setSettings] = useState(false);
  const [sample, setSample] = useState(null);
  const [running, setRunning] = useState({});
  const current = useRef(panes);
  current.current = panes;
  const list = models.data?.data ?? [];
  const asked = query.get("model");
  useEffect(() => {
    if (asked) {
      setPane(0, () => ({ model: asked }));
      history.replaceState(null, "", "#/playground");
    }
  }, [asked]);
  useEffect(() => {
    if (!list.length) return;
    const first = (list.find((one) => one.state === "warm" && !/embed/i.test(one.id)) ?? list[0]).id;
    setPanes((all) =>
      all.some((pane) => !pane.model) ? all.map((pane) => (pane.model ? pane : { ...pane, model: first })) : all,
    );
  }, [models.data]);
  // Streams end when the view closes. What has arrived is kept, and says so when the view opens again.
  useEffect(() => {
    const interrupted = { code: "cut", message: "The page was left or reloaded while the answer streamed." };
    setPanes((all) =>
      all.map((pane) => ({
        ...pane,
        turns: pane.turns.map((turn) =>
          turn.state === "running" ? { ...turn, state: "failed", error: interrupted } : turn,
        ),
      })),
    );
  }, []);
  const controllers = useRef(new Map());
  useEffect(
    () => () => {
      for (const controller of controllers.current.values()) controller.abort();
    },
    [],
  );

  function setPane(index, change) {
    setPanes((all) => all.map((pane, position) => (position === index ? { ...pane, ...change(pane) } : pane)));
  }
  const [problem, extra] = useMemo(() => readParameters(parameters), [parameters]);
  const modelOf = (pane) => list.find((one) => one.id === pane.model);
  const sees = panes.some((pane) => modelOf(pane)?.capabilities?.includes("vision"));

  const bodyFor = (pane, turns) => ({
    model: pane.model,
    messages: messagesOf(parameters.system, turns, modelOf(pane)?.capabilities?.includes("vision")),
    stream: true,
    stream_options: { include_usage: true },
    ...extra,
  });

  async function run(index, turns) {
    const pane = current.current[index];
    const controller = new AbortController();
    controllers.current.get(index)?.abort();
    controllers.current.set(index, controller);
    setRunning((all) => ({ ...all, [index]: true }));
    const answer = {
      role: "assistant",
      model: pane.model,
      at: Date.now(),
      state: "running",
      text: "",
      reasoning: "",
      calls: [],
    };
    setPane(index, () => ({ turns: [...turns, answer] }));
    const update = (part) =>
      setPane(index, (old) => ({
        turns: old.turns.map((turn) =>
          turn.at === answer.at && turn.role === "assistant" ? { ...turn, ...part } : turn,
        ),
      }));
    const result = await ask(bodyFor(pane, turns), controller.signal, update);
    update({ ...result, state: result.error ? "failed" : result.finish === "stopped" ? "stopped" : "done" });
    if (controllers.current.get(index) === controller) {
      controllers.current.delete(index);
      setRunning((all) => ({ ...all, [index]: false }));
    }
  }
  const busy = Object.values(running).some(Boolean);
  const submit = () => {
    const text = draft.trim();
    if (busy || problem || !(text || images.length)) return;
    const turn = { role: "user", text: draft, images, at: Date.now() };
    setDraft("");
    setImages([]);
    panes.forEach((pane, index) => run(index, [...pane.turns, turn]));
  };
  const stop = () => {
    for (const controller of controllers.current.values()) controller.abort();
  };
  const clear = () => {
    stop();
    const before = panes;
    setPanes((all) => all.map((pane) => ({ ...pane, turns: [] })));
    toast("The conversation is cleared.", { action: { label: "Undo", run: () => setPanes(before) } });
  };
  const retry = (index, at) => {
    const turns = current.current[index].turns;
    run(
      index,
      turns.slice(
        0,
        turns.findIndex((turn) => turn.at === at && turn.role === "assistant"),
      ),
    );
  };
  const answerCalls = (index, at, results) => {
    const turns = current.current[index].turns;
    const calls = turns.find((turn) => turn.at === at && turn.role === "assistant").calls;
    run(index, [
      ...turns,
      ...calls.map((call, position) => ({
        role: "tool",
        id: call.id,
        name: call.name,
        text: results[position] ?? "",
        at: Date.now() + position,
      })),
    ]);
  };
  const compare = () =>
    setPanes((all) =>
      all.length === 2
        ? [all[0]]
        : [
            all[0],
            {
              model:
                (
                  list.find((one) => one.state === "warm" && one.id !== all[0].model) ??
                  list.find((one) => one.id !== all[0].model) ??
                  {}
                ).id ?? all[0].model,
              turns: [],
            },
          ],
    );
  const show = (index) => {
    const pane = panes[index],
      turns = pane.turns.filter((turn) => turn.state !== "running" && turn.state !== "failed");
    const pending =
      draft.trim() || turns.length === 0 ? [...turns, { role: "user", text: draft.trim() || "Hello", images }] : turns;
    setSample(bodyFor(pane, pending.at(-1).role === "assistant" ? pending.slice(0, -1) : pending));
  };
  if (models.error && !models.data) return html`<${Failed} error=${models.error} retry=${models.reload} />`;
  if (!models.data) return html`<${Loading} label="Loading the models" />`;
  if (!list.length)
    return html`<section class="card"><${Empty} title="No models">This gateway has no model that this key may use. Load a model in Fleet, or add one to the catalog.</${Empty}></section>`;
  return html`
    <div class="title"><h1>Playground</h1><div class="tools">
      <button type="button" class="button" aria-pressed=${panes.length === 2} onClick=${compare} disabled=${busy}>Compare</button>
      <button type="button" class="button" aria-expanded=${settings} aria-controls="parameters" onClick=${() => setSettings(!settings)}>Parameters${Object.keys(extra).length || parameters.system ? " •" : ""}</button>
      <button type="button" class="button" onClick=${clear} disabled=${!panes.some((pane) => pane.turns.length)}>New chat</button></div></div>
    ${settings && html`<${Parameters} value=${parameters} set=${setParameters} problem=${problem} reasons=${panes.some((pane) => modelOf(pane)?.reasoning)} />`}
    <div class=${`panes count-${panes.length}`}>${panes.map(
      (
        pane,
        index,
      ) => html`<${Pane} key=${index} index=${index} pane=${pane} models=${list} model=${modelOf(pane)} running=${running[index]}
      choose=${(model) => setPane(index, () => ({ model }))} show=${() => show(index)} retry=${(at) => retry(index, at)} answerCalls=${(at, results) => answerCalls(index, at, results)} stop=${() => controllers.current.get(index)?.abort()} />`,
    )}</div>
    <${Composer} draft=${draft} setDraft=${setDraft} images=${images} setImages=${setImages} sees=${sees} busy=${busy} submit=${submit} stop=${stop} problem=${problem} />
    ${sample && html`<${Sample} body=${sample} onClose=${() => setSample(null)} />`}`;
}

function Parameters({ value, set, problem, reasons }) {
  const field = (name) => ({
    id: `p-${name}`,
    value: value[name],
    onInput: (event) => set({ ...value, [name]: event.target.value }),
  });
  return html`<section class="card parameters" id="parameters" aria-label="Parameters"><div class="body form">
    <label class="full">System prompt <textarea rows="2" dir="auto" ...${field("system")}></textarea></label>
    <label>Temperature <input inputmode="decimal" placeholder="model's default" ...${field("temperature")} /></label>
    <label>Top p <input inputmode="decimal" placeholder="model's default" ...${field("top_p")} /></label>
    <label>Maximum tokens <input inputmode="numeric" placeholder="free context" ...${field("max_tokens")} /></label>
    <label>Seed <input inputmode="numeric" placeholder="random" ...${field("seed")} /></label>
    <label>Reasoning <select ...${field("thinking")}><option value="">default</option><option value="on">on</option><option value="off">off</option></select></label>
    <label>Stop strings, one per line <textarea rows="1" ...${field("stop")}></textarea></label>
    <label class="full">Tools, a JSON list of functions <textarea rows="3" class="mono" spellcheck=${false} placeholder='[{"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]' ...${field("tools")}></textarea></label>
    ${value.thinking && !reasons && html`<p class="soft small full">The chosen model has no switch for reasoning.</p>`}
    ${problem && html`<p class="callout failed full" role="alert">${problem}</p>`}
    <div class="actions full"><button type="button" class="button" onClick=${() => set(NO_PARAMETERS)}>Reset</button></div></div></section>`;
}

const STATE_WORDS = { warm: "warm", loading: "loading", recovering: "recovering", cold: "cold: loads first" };

function Pane({ index, pane, models, model, running, choose, show, retry, answerCalls, stop }) {
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
                html`<${Turn} key=${`${turn.role}${turn.at}`} turn=${turn} running=${running} retry=${retry} answerCalls=${answerCalls} stop=${stop} />`,
            )
          : html`<${Empty} title="Start a conversation">The answer streams here, with its speed. Nothing is stored on the gateway.</${Empty}>`
      }
    </div></section>`;
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
