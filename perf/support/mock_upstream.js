// A mock node with minimal costs. The node has the model `m` and answers every request at once, with JSON or with 64
// server-sent events in separate writes. If the body contains "pause", the events are 2 ms apart. If the body contains
// "hold", the node sends one event and then keeps the connection open.
// usage: node mock_upstream.js PORT
const http = require('http');

const EVENTS = 64;
const usage = { prompt_tokens: 10, completion_tokens: EVENTS, total_tokens: 10 + EVENTS };
const record = { id: 'c', created: 1, model: 'm' };
const event = (choices, more) =>
  `data: ${JSON.stringify({ ...record, object: 'chat.completion.chunk', choices, ...more })}\n\n`;
const events = Array.from({ length: EVENTS }, (_, number) =>
  event([{ index: 0, delta: { content: `token${number} ` }, finish_reason: null }]));
const end = event([{ index: 0, delta: {}, finish_reason: 'stop' }]) + event([], { usage }) + 'data: [DONE]\n\n';
const message = { role: 'assistant', content: 'hello world' };
const answer = JSON.stringify(
  { ...record, object: 'chat.completion', choices: [{ index: 0, message, finish_reason: 'stop' }], usage });
const models = JSON.stringify([{ id: 'm', harness: 'torch', status: 'loaded', devices: [] }]);

function json(response, status, body) {
  response.writeHead(status, { 'content-type': 'application/json', 'content-length': Buffer.byteLength(body) });
  response.end(body);
}

function stream(response, body) {
  response.writeHead(200, { 'content-type': 'text/event-stream' });
  if (body.includes('"hold"')) return response.write(events[0]);
  const later = body.includes('"pause"') ? (next) => setTimeout(next, 2) : setImmediate;
  let next = 0;
  const say = () => {
    if (next === EVENTS) return response.end(end);
    response.write(events[next++]);
    later(say);
  };
  say();
}

http.createServer((request, response) => {
  const pieces = [];
  request.on('data', (piece) => pieces.push(piece));
  request.on('end', () => {
    const body = Buffer.concat(pieces);
    if (request.url === '/models') return json(response, 200, models);
    if (!request.url.startsWith('/v1/')) return json(response, 404, '{}');
    return /"stream":\s*true/.test(body.toString('latin1')) ? stream(response, body) : json(response, 200, answer);
  });
}).listen(Number(process.argv[2]), '127.0.0.1');
