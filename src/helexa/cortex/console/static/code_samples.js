// The playground's request as a program: curl, and Python with OpenAI's library.

const KEY = "HELEXA_API_KEY";

// Return a text as one word of a shell command.
export const shell = (text) =>
  /^[\w@%+:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;

// Return a value as JSON in which invisible characters are escape sequences. A string is also a literal in Python, TOML
// and YAML, because JSON.stringify leaves no control characters and the escape sequences are the same.
export const json = (value, indent) =>
  JSON.stringify(value, null, indent).replace(
    /[\p{Cc}\p{Cf}\u2028\u2029]/gu,
    (character) =>
      character.length > 1 || character === "\n"
        ? character
        : `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );

export function asCurl(body, origin, needsKey) {
  const key = needsKey ? ` \\\n  -H "authorization: Bearer $${KEY}"` : "";
  return `curl -N ${origin}/v1/chat/completions -H 'content-type: application/json'${key} \\\n  -d ${shell(json(body, 2))}`;
}

const OPENAI_FIELDS = new Set([
  "model",
  "messages",
  "temperature",
  "top_p",
  "max_tokens",
  "seed",
  "stop",
  "tools",
  "tool_choice",
  "stream",
  "stream_options",
  "reasoning_effort",
  "frequency_penalty",
  "presence_penalty",
]);

export function asPython(body, origin, needsKey) {
  const fields = Object.fromEntries(Object.entries(body).filter(([name]) => !/^stream/.test(name)));
  const extra = Object.fromEntries(Object.entries(fields).filter(([name]) => !OPENAI_FIELDS.has(name)));
  const lines = Object.entries(fields)
    .filter(([name]) => OPENAI_FIELDS.has(name))
    .map(([name, value]) => `    ${name}=${python(value, 4)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${python(extra, 4)},`);
  const key = needsKey ? `os.environ["${KEY}"]` : '"any"';
  return `${needsKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${origin}/v1", api_key=${key})
stream = client.chat.completions.create(
${lines.join("\n")}
    stream=True,
)
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)
`;
}

// Return a JSON value as a Python literal.
function python(value, indent) {
  const pad = " ".repeat(indent);
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "number") return String(value);
  if (typeof value === "string") return json(value);
  if (Array.isArray(value))
    return value.length
      ? `[\n${value.map((one) => `${pad}    ${python(one, indent + 4)},`).join("\n")}\n${pad}]`
      : "[]";
  const entries = Object.entries(value);
  return entries.length
    ? `{${entries.map(([name, one]) => `${json(name)}: ${python(one, indent + 4)}`).join(", ")}}`
    : "{}";
}
