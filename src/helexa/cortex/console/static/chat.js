// One streamed chat completion: sends the request, and reports text, reasoning, tool calls and speed as they arrive.

import { ApiError, events, send, sentence } from "./api.js";

// Stream an answer. `update` is called with the answer so far, at most every 40 milliseconds, and at its end.
// The answer is {text, reasoning, calls, finish, usage, pieces, firstAt, lastAt, startedAt, error, progress, route}.
export async function ask(body, signal, update) {
  const answer = {
    text: "",
    reasoning: "",
    calls: [],
    finish: null,
    usage: null,
    pieces: 0,
    startedAt: performance.now(),
    firstAt: null,
    lastAt: null,
    error: null,
    progress: "",
    route: "",
  };
  let timer = null,
    cost = 0,
    ended = false;
  const report = () => {
    timer = null;
    const began = performance.now();
    update({ ...answer, calls: answer.calls.map((call) => ({ ...call })) });
    cost = performance.now() - began;
  };
  // The longer an update takes, as for long answers, the longer is the pause before the next update.
  const changed = () => {
    timer ??= setTimeout(report, Math.max(40, Math.min(1000, 8 * cost)));
  };
  try {
    const response = await send("/v1/chat/completions", { method: "POST", body, signal });
    answer.route = response.headers.get("x-helexa-route") ?? "";
    for await (const { event, data } of events(response)) {
      if (event === "comment") {
        answer.progress = data;
        changed();
        continue;
      }
      if (data === "[DONE]") {
        ended = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(sentence(chunk.error.message ?? "the answer broke off"), 0, chunk.error.code);
      if (chunk.usage) answer.usage = chunk.usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      const delta = choice.delta ?? {};
      const reasoning = delta.reasoning_content ?? delta.reasoning;
      if (reasoning) answer.reasoning += reasoning;
      if (delta.content) answer.text += delta.content;
      for (const call of delta.tool_calls ?? []) {
        const known = (answer.calls[call.index ?? 0] ??= { id: "", name: "", arguments: "" });
        if (call.id) known.id = call.id;
        if (call.function?.name) known.name += call.function.name;
        if (call.function?.arguments) known.arguments += call.function.arguments;
      }
      if (reasoning || delta.content || delta.tool_calls) {
        answer.pieces += 1;
        answer.lastAt = performance.now();
        answer.firstAt ??= answer.lastAt;
        answer.progress = "";
      }
      if (choice.finish_reason) {
        answer.finish = choice.finish_reason;
        ended = true;
      }
      changed();
    }
    if (!ended)
      throw new ApiError("The stream ended in the middle of the answer: the node or the connection failed.", 0, "cut");
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else
      answer.error =
        error instanceof ApiError
          ? { message: error.message, status: error.status, code: error.code }
          : { message: "The stream ended in the middle of the answer: the connection failed.", code: "cut" };
  }
  clearTimeout(timer);
  answer.calls = answer.calls.filter(Boolean);
  report();
  return answer;
}

const CHARS_PER_TOKEN = 4.5; // of English text

// Time to first token in milliseconds, and tokens per second between the first and the last token. While the answer runs,
// the number of tokens is an estimate: most nodes send one piece per token.
export function speed(answer) {
  if (answer.firstAt == null) return { first: null, rate: null, tokens: null };
  const estimate = Math.max(answer.pieces ?? 0, (answer.text.length + answer.reasoning.length) / CHARS_PER_TOKEN);
  const tokens = answer.usage?.completion_tokens ?? (answer.state === "running" ? Math.round(estimate) : null),
    seconds = (answer.lastAt - answer.firstAt) / 1000;
  return {
    first: answer.firstAt - answer.startedAt,
    tokens,
    rate: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null,
  };
}
