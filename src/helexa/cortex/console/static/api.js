// Requests to the gateway's API with the session's cookie and CSRF token, and errors in words.

import { createStore } from "./lib.js";

// The response of `GET /api/session`, or null until it has arrived.
export const session = createStore(null);

// Why the sign-in dialog is open: {message, needsAdmin}, or null if it is closed.
export const signInRequest = createStore(null);

// True after a session has ended against the user's will: the view stays under the dialog, so that nothing typed is lost.
export const interrupted = createStore(false);

export class ApiError extends Error {
  constructor(message, status, code, retryAfter) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

const STATUS_WORDS = {
  0: "The gateway does not answer. Check that it is running and that this machine can reach it.",
  401: "You are signed out. Sign in to go on.",
  403: "This key does not allow it.",
  413: "The request is too large.",
  429: "A limit of this key is reached.",
  500: "The gateway has an internal error; its log has the details.",
  502: "The node did not answer.",
  503: "The gateway cannot serve the request now.",
  504: "A proxy or the node did not answer in time.",
};

async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    /* not JSON: a proxy's page */
  }
  if (typeof error === "string") error = { message: error };
  const words = error.message || STATUS_WORDS[response.status] || `The gateway answered with HTTP ${response.status}.`;
  return new ApiError(
    sentence(words),
    response.status,
    error.code,
    Number(response.headers.get("retry-after")) || null,
  );
}

export function sentence(text) {
  const trimmed = text.trim();
  if (!trimmed) return "";
  const upper = trimmed[0].toUpperCase() + trimmed.slice(1);
  return /[.!?…]$/.test(upper) ? upper : `${upper}.`;
}

// Send a request and return the response. Raises ApiError. A 401 of a signed-in user opens the sign-in dialog.
export async function send(path, { method = "GET", body, signal, headers = {} } = {}) {
  const csrf = session.get()?.csrf;
  let response;
  try {
    response = await fetch(path, {
      method,
      signal,
      cache: "no-store",
      credentials: "same-origin",
      headers: {
        ...(csrf ? { "x-helexa-csrf": csrf } : {}),
        ...(body === undefined ? {} : { "content-type": "application/json" }),
        ...headers,
      },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(STATUS_WORDS[0], 0, "unreachable");
  }
  if (response.ok) return response;
  const error = await errorOf(response);
  if (error.status === 401 && path !== "/api/session") await sessionEnded(error);
  throw error;
}

export const get = async (path, options) => (await send(path, options)).json();
export const post = async (path, body = {}, options = {}) =>
  (await send(path, { method: "POST", body, ...options })).json();

export async function refreshSession() {
  const found = await get("/api/session");
  session.set(found);
  return found;
}

// True while the user signs out. The stream of events may then end before the response to the sign-out arrives.
let signingOut = false;

// Learn why a request was rejected, and ask to sign in again.
export async function sessionEnded(error) {
  if (signingOut) return;
  const before = session.get();
  if (before?.signed_in) interrupted.set(true);
  let now;
  try {
    now = await refreshSession();
  } catch {
    return;
  }
  if (now.signed_in) interrupted.set(false);
  else if (before?.signed_in)
    signInRequest.set({
      message: sentence(now.reason && !/missing/.test(now.reason) ? now.reason : "your session has ended"),
    });
  else if (!signInRequest.get() && (now.require_auth || error.code === "invalid_api_key"))
    signInRequest.set({ message: sentence(error.message) });
}

// Sign in with an API key, or with the token of a sign-in link: {key} or {link}.
export async function signIn(credential) {
  const found = await (await send("/api/session", { method: "POST", body: credential })).json();
  interrupted.set(false);
  session.set(found);
  return found;
}

export async function signOut() {
  interrupted.set(false);
  signingOut = true;
  try {
    await send("/api/session", { method: "DELETE" });
  } catch {
    /* the session has ended already */
  }
  try {
    await refreshSession();
  } finally {
    signingOut = false;
  }
}

// Return true if the user is an admin. Otherwise open the sign-in dialog and return false.
export function requireAdmin(action) {
  if (session.get()?.role === "admin") return true;
  const how = session.get()?.links ? "an admin: open a sign-in link, or enter an admin's key." : "an admin's key.";
  signInRequest.set({ message: `${action} needs ${how}`, needsAdmin: true });
  return false;
}

// The gateway's configuration file, with its path if this user may know it.
export const configFile = () => session.get()?.config_file ?? "cortex.toml";

// Return whether the page may see all nodes and requests: for admins, and for everyone if no keys are required.
export const seesFleet = (value) => value?.role === "admin" || value?.require_auth === false;

// Return whether lists of requests and charges contain those of all accounts.
export const seesAllAccounts = (value) =>
  value?.role === "admin" || (value?.require_auth === false && !value.signed_in);

// Yield the events of a stream as {event, data}. `data` is text.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += value;
      let end;
      while ((end = buffer.indexOf("\n\n")) >= 0) {
        const block = buffer.slice(0, end);
        buffer = buffer.slice(end + 2);
        let event = "message",
          data = "",
          comment = "";
        for (const line of block.split("\n")) {
          if (line.startsWith("event:")) event = line.slice(6).trim();
          else if (line.startsWith("data:")) data += (data ? "\n" : "") + line.slice(5).replace(/^ /, "");
          else if (line.startsWith(":")) comment = line.slice(1).trim();
        }
        if (data) yield { event, data };
        else if (comment) yield { event: "comment", data: comment };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
