// The page: header, navigation, sign-in, and the view that the address names.

import { configFile, interrupted, refreshSession, sentence, session, signIn, signInRequest, signOut } from "./api.js";
import { shell } from "./code_samples.js";
import { html, plural, render, useEffect, useRef, useState, useStore } from "./lib.js";
import { live, startLive } from "./live.js";
import { Code, Dialog, Failed, Loading, Notice, Toasts } from "./ui.js";

// Modules of views are loaded when their view is opened for the first time.
const VIEWS = [
  { name: "fleet", title: "Fleet", load: () => import("./fleet.js") },
  { name: "playground", title: "Playground", load: () => import("./playground.js") },
  { name: "activity", title: "Activity", load: () => import("./activity.js") },
  { name: "keys", title: "Keys", load: () => import("./keys.js") },
  { name: "usage", title: "Usage", load: () => import("./usage.js") },
  { name: "connect", title: "Connect", load: () => import("./connect.js") },
  { name: "log", title: "Log", load: () => import("./log.js"), isForAdmins: true },
];
const loaded = new Map();
const DEFAULT_PORT = "31313";
const LINK = /^link\/(.+)$/;

const readRoute = () => location.hash.replace(/^#\/?/, "").split("?");

// Learn who the user is. If the address bar contains a sign-in link, remove the link and sign in with it first. A link that
// the gateway rejects matters only to a user who is not an admin already.
async function identify() {
  const token = readRoute()[0].match(LINK)?.[1];
  if (!token) return refreshSession();
  history.replaceState(null, "", "#/fleet");
  try {
    await signIn({ link: token });
    signInRequest.set(null);
  } catch (error) {
    const found = await refreshSession();
    if (found.role !== "admin") signInRequest.set({ message: error.message, needsAdmin: !found.require_auth });
  }
  return session.get();
}

function useRoute() {
  const [route, setRoute] = useState(readRoute);
  useEffect(() => {
    const change = () => setRoute(readRoute());
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  return { name: route[0], query: new URLSearchParams(route[1] ?? "") };
}

function Header({ current, gated }) {
  const value = useStore(session);
  const [theme, setTheme] = useState(helexaTheme.current);
  return html`<header class="top">
    <a class="brand" href="#/fleet">helexa <span>console</span></a>
    ${
      !gated &&
      html`<nav aria-label="Views">${VIEWS.map(
        (view, index) =>
          (!view.isForAdmins || value?.role === "admin") &&
          html`
      <a href=${`#/${view.name}`} aria-current=${view.name === current ? "page" : undefined} title=${`g ${index + 1}`}>${view.title}</a>`,
      )}
      ${value?.bench_url && html`<a href=${value.bench_url} rel="noreferrer">Bench ↗</a>`}</nav>`
    }
    <button type="button" class="theme" aria-label=${`Theme: ${theme}`} title=${`Theme: ${theme}`} onClick=${() => setTheme(helexaTheme.next())}><span class="long">Theme: ${theme}</span><span class="short" aria-hidden="true">${{ auto: "◐", light: "☀", dark: "☾" }[theme]}</span></button>
    ${
      value &&
      (value.signed_in
        ? html`<span class="who"><bdi title=${`key ${value.key_id}`}>${value.account_id}</bdi>${value.role === "admin" && html`<span class="badge">admin</span>`}
          <button type="button" class="theme" onClick=${signOut}>Sign out</button></span>`
        : html`<button type="button" class="theme" onClick=${() => signInRequest.set({ message: "" })}>Sign in</button>`)
    }
  </header>`;
}

function SignInForm({ message, needsAdmin, onDone }) {
  const value = useStore(session);
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const field = useRef(null);
  useEffect(() => field.current?.focus(), []);
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    setProblem("");
    try {
      const found = await signIn({ key: field.current.value });
      if (needsAdmin && found.role !== "admin") setProblem("This key is valid, but it is not an admin's key.");
      else onDone?.();
    } catch (error) {
      setProblem(
        error.status === 401 && error.code === "invalid_api_key"
          ? sentence(
              error.message.replace(
                /^Invalid API key;.*$/,
                "This gateway does not know this key. Check that it is complete",
              ),
            )
          : error.message,
      );
    } finally {
      setBusy(false);
    }
  };
  return html`<form class="form" onSubmit=${submit}>
    ${message && html`<p class="callout notice" role="status">${message}</p>`}
    ${
      value?.links &&
      html`<div class="link-hint"><p>Without a key: this command prints a link that signs this browser in as an admin. It needs to read <code>${configFile()}</code>.</p>
      <${Code} title="terminal" text=${`helexa console${location.port === DEFAULT_PORT ? "" : ` --url ${location.origin}`}`} /></div>`
    }
    <label>${value?.links ? "Or with an API key" : "API key"}
      <input ref=${field} type="password" name="key" autocomplete="current-password" required spellcheck=${false} placeholder="hlx_…" aria-describedby="key-help" />
    </label>
    <p id="key-help" class="soft small">Any key of this gateway works. Admins see all accounts and may change the fleet.</p>
    ${problem && html`<p class="callout failed" role="alert">${problem}</p>`}
    <div class="actions"><button class="button primary" disabled=${busy}>${busy ? "Signing in…" : "Sign in"}</button>
      ${value?.providers?.includes("oidc") && html`<a class="button" href="/console/oidc/login">Sign in with your organization</a>`}</div>
    <details><summary>No key yet?</summary><p class="small">An administrator creates keys in this console, or on the gateway's machine:</p>
      <pre tabindex="0"><code>cortex keys create -c ${shell(configFile())} --account ops --admin</code></pre></details>
  </form>`;
}

function SignInPage({ failed, request }) {
  return html`<main id="main" class="gate" tabindex="-1"><section class="card"><div class="head"><h1>Sign in to this gateway</h1></div><div class="body">
    ${failed && html`<p class="callout failed" role="alert">The sign-in with your organization failed. The gateway's log has the reason; an administrator can look it up.</p>`}
    <${SignInForm} ...${request} onDone=${() => signInRequest.set(null)} /></div></section></main>`;
}

function View({ route }) {
  const view = VIEWS.find((one) => one.name === route.name) ?? VIEWS[0];
  const [, rerender] = useState(0);
  const [problem, setProblem] = useState(null);
  const open = () => {
    setProblem(null);
    view.load().then((module) => {
      loaded.set(view.name, module.default);
      rerender((n) => n + 1);
    }, setProblem);
  };
  useEffect(() => {
    document.title = `${view.title} · helexa`;
    if (!loaded.has(view.name)) open();
  }, [view.name]);
  const Content = loaded.get(view.name);
  if (problem)
    return html`<main id="main" tabindex="-1"><${Failed} error=${{ message: "A part of the page could not be loaded. The gateway may have been updated: reload the page." }} retry=${() => location.reload()} /></main>`;
  return html`<main id="main" tabindex="-1" class=${`view-${view.name}`}>${Content ? html`<${Content} query=${route.query} />` : html`<${Loading} />`}</main>`;
}

function Connection() {
  const state = useStore(live);
  const [, tick] = useState(0);
  useEffect(() => {
    if (state.state !== "lost") return undefined;
    const timer = setInterval(() => tick((n) => n + 1), 1000);
    return () => clearInterval(timer);
  }, [state.state]);
  if (state.state !== "lost") return null;
  const seconds = Math.round((Date.now() - state.since) / 1000);
  return html`<div class="banner"><${Notice} title="Not live.">${state.problem} The figures are ${plural(Math.max(1, seconds), "second")} old; the page reconnects by itself.</${Notice}></div>`;
}

function App() {
  const route = useRoute();
  const value = useStore(session);
  const request = useStore(signInRequest);
  const [problem, setProblem] = useState(null);
  const start = () => {
    setProblem(null);
    identify().then(startLive, setProblem);
  };
  useEffect(start, []);
  useEffect(() => {
    if (session.get() && LINK.test(readRoute()[0])) identify().catch(setProblem); // pasted into the open page
  }, [route.name]);
  useEffect(() => {
    if (route.name === "" || (route.name === "sign-in-failed" && value?.signed_in))
      history.replaceState(null, "", "#/fleet");
  }, [route.name, value]);
  const current = VIEWS.find((one) => one.name === route.name)?.name ?? "fleet";
  const gated = value && value.require_auth && !value.signed_in;
  const kept = useStore(interrupted);
  const account = useRef("");
  if (value?.signed_in) account.current = value.account_id;
  let content;
  if (problem) content = html`<main id="main"><${Failed} error=${problem} retry=${start} /></main>`;
  else if (!value) content = html`<main id="main"><${Loading} /></main>`;
  else if (gated && !kept) content = html`<${SignInPage} failed=${route.name === "sign-in-failed"} request=${request} />`;
  else content = html`<${View} key=${account.current} route=${route} />`;
  return html`
    <a class="skip" href="#main" onClick=${(event) => {
      event.preventDefault();
      document.getElementById("main")?.focus();
    }}>Skip to content</a>
    <${Header} current=${current} gated=${gated && !kept} />
    ${kept && !request && html`<div class="banner"><${Notice} title="You are signed out." action=${html`<button type="button" class="button" onClick=${() => signInRequest.set({ message: "" })}>Sign in</button>`}>What you typed is still here.</${Notice}></div>`}
    <${Connection} />
    ${content}
    ${
      request &&
      !(gated && !kept) &&
      html`<${Dialog} title=${request.needsAdmin ? "Sign in as an admin" : "Sign in"} onClose=${() => signInRequest.set(null)}>
      <div class="body"><${SignInForm} ...${request} onDone=${() => signInRequest.set(null)} /></div></${Dialog}>`
    }
    <${Toasts} />`;
}

// Keys outside of fields: / focuses the filter, g and a number open a view.
let going = false;
addEventListener("keydown", (event) => {
  if (
    event.target.closest?.("input, select, textarea, dialog, [contenteditable]") ||
    event.ctrlKey ||
    event.metaKey ||
    event.altKey
  )
    return;
  if (event.key === "/") {
    const field = document.querySelector("main [type=search]");
    if (field) {
      field.focus();
      event.preventDefault();
    }
  } else if (event.key === "g") {
    going = true;
    setTimeout(() => {
      going = false;
    }, 1200);
  } else if (going && /^[1-9]$/.test(event.key)) {
    const view = VIEWS[Number(event.key) - 1];
    if (view) location.hash = `#/${view.name}`;
    going = false;
  }
});

render(html`<${App} />`, document.getElementById("app"));
