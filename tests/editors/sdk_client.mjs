// A client built with the TypeScript SDK. Its instructions are JSON in argv; each event it sees is a JSON line on stdout.
import { spawn } from "node:child_process";
import { readFile, writeFile } from "node:fs/promises";
import { Readable, Writable } from "node:stream";
import { pathToFileURL } from "node:url";

const instructions = JSON.parse(process.argv[2]);
const acp = await import(pathToFileURL(instructions.sdk));
const see = (kind, value) => process.stdout.write(JSON.stringify({ kind, value }) + "\n");

const agent = spawn(instructions.agent[0], instructions.agent.slice(1), { stdio: ["pipe", "pipe", "inherit"] });
const stream = acp.ndJsonStream(Writable.toWeb(agent.stdin), Readable.toWeb(agent.stdout));
const terminals = new Map();
let context;

const handlers = {
  "fs/read_text_file": async ({ path, line, limit }) => {
    const lines = (await readFile(path, "utf8")).split(/(?<=\n)/);
    const start = (line ?? 1) - 1;
    return { content: lines.slice(start, limit ? start + limit : undefined).join("") };
  },
  "fs/write_text_file": async ({ path, content }) => {
    await writeFile(path, content);
    return {};
  },
  "terminal/create": async ({ command, args, cwd }) => {
    const child = spawn(command, args ?? [], { cwd, stdio: ["ignore", "pipe", "pipe"] });
    const terminal = { child, output: "" };
    for (const pipe of [child.stdout, child.stderr]) pipe.on("data", (data) => (terminal.output += data));
    terminal.exit = new Promise((done) => child.on("close", (exitCode, signal) => done({ exitCode, signal })));
    const terminalId = `terminal-${terminals.size + 1}`;
    terminals.set(terminalId, terminal);
    return { terminalId };
  },
  "terminal/wait_for_exit": async ({ terminalId }) => await terminals.get(terminalId).exit,
  "terminal/output": async ({ terminalId }) => ({ output: terminals.get(terminalId).output, truncated: false }),
  "terminal/kill": async ({ terminalId }) => {
    terminals.get(terminalId).child.kill("SIGKILL");
    return {};
  },
  "terminal/release": async ({ terminalId }) => {
    terminals.get(terminalId).child.kill("SIGKILL");
    return {};
  },
  "session/request_permission": async ({ sessionId, options }) => {
    if (instructions.decision === "cancel") {
      await context.notify("session/cancel", { sessionId });
      return { outcome: { outcome: "cancelled" } };
    }
    const option = options.find(({ kind }) => kind === instructions.decision);
    return { outcome: { outcome: "selected", optionId: option.optionId } };
  },
};

let client = acp.client({ name: "sdk-client" });
for (const [method, handle] of Object.entries(handlers)) {
  client = client.onRequest(method, async ({ params }) => {
    see(method, params);
    if (instructions.refuse.includes(method)) throw new acp.RequestError(-32603, `no ${method} today`);
    return await handle(params);
  });
}
client = client.onNotification("session/update", async ({ params }) => see("session/update", params));

await client.connectWith(stream, async (connected) => {
  context = connected;
  const fs = { readTextFile: true, writeTextFile: true };
  const clientInfo = { name: "sdk-client", version: "1" };
  const clientCapabilities = { fs, terminal: true, session: { notices: {}, compaction: {} } };
  see("initialize", await context.request("initialize", { protocolVersion: 1, clientInfo, clientCapabilities }));
  const ids = [];
  for (const together of instructions.steps) {
    await Promise.all(
      together.map(async ([method, params]) => {
        const sessionId = typeof params.sessionId === "number" ? ids[params.sessionId] : params.sessionId;
        const result = await context.request(method, sessionId === undefined ? params : { ...params, sessionId });
        if (method === "session/new") ids.push(result.sessionId);
        see(method, result);
      }),
    );
  }
  agent.kill(instructions.end);
});
process.exit(0);
