// The running answers of a chat: sends the requests of its panes, and handles the user's actions on turns.

import { ask } from "./chat.js";
import { newTurnId } from "./chats.js";
import { useEffect, useMemo, useRef, useState } from "./lib.js";
import { toast } from "./ui.js";

// Return the panes that run, as {index: true}, and functions with the index of a pane: `run` asks for an answer to a list
// of turns, `retry` asks again for the answer `at`, `edit` asks again with another text of the message `at`,
// `answerCalls` sends the results of tool calls, `stop` ends the answer, `stopAll` ends all answers. Every call of
// `useAnswers` returns the same function objects.
export function useAnswers(panes, setPanes, bodyFor) {
  const [running, setRunning] = useState({});
  const controllers = useRef(new Map());
  const current = useRef(null);
  current.current = { panes, setPanes, bodyFor };
  const actions = useMemo(() => {
    const turnsOf = (index) => current.current.panes[index].turns;
    const setPane = (index, change) =>
      current.current.setPanes((all) =>
        all.map((pane, position) => (position === index ? { ...pane, ...change(pane) } : pane)),
      );
    const stop = (index) => controllers.current.get(index)?.abort();
    const stopAll = () => [...controllers.current.keys()].forEach(stop);
    const before = (index, role, at) => {
      const turns = turnsOf(index);
      return turns.slice(
        0,
        turns.findIndex((turn) => turn.at === at && turn.role === role),
      );
    };
    async function run(index, turns) {
      const pane = current.current.panes[index];
      const controller = new AbortController();
      stop(index);
      controllers.current.set(index, controller);
      setRunning((all) => ({ ...all, [index]: true }));
      const answer = {
        role: "assistant",
        model: pane.model,
        at: newTurnId(),
        state: "running",
        text: "",
        reasoning: "",
        calls: [],
      };
      setPane(index, () => ({ turns: [...turns, answer] }));
      const isAnswer = (turn) => turn.at === answer.at && turn.role === "assistant";
      const update = (part) =>
        current.current.setPanes((all) => {
          if (!all[index]?.turns.some(isAnswer)) return all; // another chat is open
          const turns = all[index].turns.map((turn) => (isAnswer(turn) ? { ...turn, ...part } : turn));
          return all.map((old, position) => (position === index ? { ...old, turns } : old));
        });
      const result = await ask(current.current.bodyFor(pane, turns), controller.signal, update);
      update({ ...result, state: result.error ? "failed" : result.finish === "stopped" ? "stopped" : "done" });
      if (controllers.current.get(index) === controller) {
        controllers.current.delete(index);
        setRunning((all) => ({ ...all, [index]: false }));
      }
    }
    const retry = (index, at) => run(index, before(index, "assistant", at));
    const edit = (index, at, text) => {
      const all = turnsOf(index),
        kept = before(index, "user", at);
      run(index, [...kept, { ...all[kept.length], text, at: newTurnId() }]);
      if (all.length > kept.length + 2) {
        const undo = () => {
          stop(index);
          setPane(index, () => ({ turns: all }));
        };
        toast("The messages after the edited one are removed.", { action: { label: "Undo", run: undo } });
      }
    };
    const answerCalls = (index, at, results) => {
      const turns = turnsOf(index);
      const calls = turns.find((turn) => turn.at === at && turn.role === "assistant").calls;
      const added = calls.map((call, position) => ({
        role: "tool",
        id: call.id,
        name: call.name,
        text: results[position] ?? "",
        at: newTurnId(),
      }));
      run(index, [...turns, ...added]);
    };
    return { run, retry, edit, answerCalls, stop, stopAll };
  }, []);
  useEffect(() => actions.stopAll, []);
  return { running, actions };
}
