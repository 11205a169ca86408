// The body of a chat completion, made of a conversation and the parameters of the playground.

import { compact } from "./lib.js";

// The messages of a request. Models that see no images get the text alone.
export function messagesOf(system, turns, vision) {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  for (const turn of turns) {
    if (turn.role === "user") {
      const parts = vision
        ? (turn.images ?? []).filter((image) => image.url).map((image) => ({ type: "image_url", image_url: { url: image.url } }))
        : [];
      messages.push({
        role: "user",
        content: parts.length ? [{ type: "text", text: turn.text }, ...parts] : turn.text,
      });
    } else if (turn.role === "tool") messages.push({ role: "tool", tool_call_id: turn.id, content: turn.text });
    else if (turn.state !== "failed" || turn.text || turn.calls.length) {
      const calls = turn.calls.map((call) => ({
        id: call.id,
        type: "function",
        function: { name: call.name, arguments: call.arguments },
      }));
      if (turn.text || calls.length)
        messages.push({
          role: "assistant",
          content: turn.text || null,
          ...(calls.length ? { tool_calls: calls } : {}),
        });
    }
  }
  return messages;
}

// Return [problem, fields of the request]. Empty parameters are left out, so that the model's defaults apply.
export function readParameters(parameters) {
  const fields = {};
  const numbers = { temperature: [0, 2], top_p: [0, 1], max_tokens: [1, 1e9], seed: [0, 2 ** 53] };
  for (const [name, [low, high]] of Object.entries(numbers)) {
    if (String(parameters[name]).trim() === "") continue;
    const value = Number(parameters[name]);
    if (
      !Number.isFinite(value) ||
      value < low ||
      value > high ||
      (name !== "temperature" && name !== "top_p" && !Number.isInteger(value))
    )
      return [`${name} must be a number from ${low} to ${compact(high)}.`, {}];
    fields[name] = value;
  }
  if (parameters.stop) fields.stop = parameters.stop.split("\n").filter(Boolean);
  if (parameters.thinking) fields.enable_thinking = parameters.thinking === "on";
  if (parameters.tools.trim()) {
    try {
      const tools = JSON.parse(parameters.tools);
      if (!Array.isArray(tools)) throw new Error("not a list");
      fields.tools = tools.map((tool) => (tool.type === "function" ? tool : { type: "function", function: tool }));
    } catch (error) {
      return [`The tools are not a JSON list: ${error.message}`, {}];
    }
  }
  return ["", fields];
}
