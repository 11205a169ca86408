// What all modules use: Preact with htm templates, stores, and text for numbers and times.

import { Component, Fragment, h, render } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import htm from "htm";

export { Component, Fragment, h, render, useEffect, useLayoutEffect, useMemo, useRef, useState };
export const html = htm.bind(h);

// A value that components can follow. `set` takes the new value, or a function from the old to the new value.
export function createStore(initial) {
  let value = initial;
  const listeners = new Set();
  return {
    get: () => value,
    set(next) {
      const changed = typeof next === "function" ? next(value) : next;
      if (Object.is(changed, value)) return;
      value = changed;
      for (const listener of [...listeners]) listener();
    },
    subscribe(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}

// Return the selected part of a store's value, and render the component again when the part changes.
export function useStore(store, select = (value) => value) {
  const selected = select(store.get());
  const last = useRef(selected);
  last.current = selected;
  const [, rerender] = useState(0);
  useEffect(() => {
    const check = () => {
      if (!Object.is(select(store.get()), last.current)) rerender((count) => count + 1);
    };
    check();
    return store.subscribe(check);
  }, [store]);
  return selected;
}

// A component that renders again only if one of its properties is another object or value.
export function memo(view) {
  return class extends Component {
    shouldComponentUpdate(next) {
      const names = Object.keys(next);
      return (
        names.length !== Object.keys(this.props).length ||
        names.some((name) => !Object.is(next[name], this.props[name]))
      );
    }
    render(props) {
      return h(view, props);
    }
  };
}

// State that survives a reload of this tab. `limit` is the largest stored text; larger values are not stored. The name
// should contain the account, so that another account that signs in does not see the value.
export function useTabState(name, initial, limit = 400_000) {
  const [value, setValue] = useState(() => {
    try {
      return JSON.parse(sessionStorage.getItem(name)) ?? initial;
    } catch {
      return initial;
    }
  });
  // A layout effect, because a reload may come before the next paint.
  useLayoutEffect(() => {
    const store = () => {
      const text = JSON.stringify(value);
      try {
        if (text.length <= limit) sessionStorage.setItem(name, text);
        else sessionStorage.removeItem(name);
      } catch {
        /* full */
      }
    };
    const timer = setTimeout(store, 300);
    addEventListener("pagehide", store);
    return () => {
      clearTimeout(timer);
      removeEventListener("pagehide", store);
    };
  }, [value]);
  return [value, setValue];
}

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => whole.format(value);
export const rate = (value) => (value >= 100 ? whole : plain).format(value);
export const plural = (value, one, many = `${one}s`) => `${count(value)} ${value === 1 ? one : many}`;

export function compact(value) {
  if (value < 10_000) return whole.format(value);
  if (value < 1_000_000) return `${plain.format(value / 1000)}k`;
  if (value < 1_000_000_000) return `${plain.format(value / 1e6)}M`;
  return `${plain.format(value / 1e9)}G`;
}

// An amount in US dollars. Small amounts have more digits.
export function money(dollars) {
  if (dollars >= 1000) return `$${whole.format(dollars)}`;
  if (dollars >= 0.1 || dollars === 0) return `$${dollars.toFixed(2)}`;
  return `$${dollars.toLocaleString("en", { maximumSignificantDigits: 2 })}`;
}

export function memory(megabytes) {
  return megabytes < 1024 ? `${whole.format(megabytes)} MB` : `${plain.format(megabytes / 1024)} GB`;
}

export function duration(milliseconds) {
  if (milliseconds < 1000) return `${whole.format(milliseconds)} ms`;
  const seconds = milliseconds / 1000;
  if (seconds < 60) return `${plain.format(seconds)} s`;
  const units =
    seconds < 3600
      ? [
          [60, "min"],
          [1, "s"],
        ]
      : seconds < 172_800
        ? [
            [3600, "h"],
            [60, "min"],
          ]
        : [
            [86_400, "d"],
            [3600, "h"],
          ];
  const [[large, largeName], [small, smallName]] = units;
  const rest = Math.floor((seconds % large) / small);
  return `${Math.floor(seconds / large)} ${largeName}${rest ? ` ${rest} ${smallName}` : ""}`;
}

// A context length in tokens, which is usually a multiple of 1,024.
export const context = (tokens) =>
  tokens >= 1024 && tokens % 1024 === 0 ? `${count(tokens / 1024)}k` : compact(tokens);

const two = (value) => String(value).padStart(2, "0");
export function clock(milliseconds) {
  const date = new Date(milliseconds);
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}
export function day(milliseconds) {
  const date = new Date(milliseconds);
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
}
export const moment = (milliseconds) => `${day(milliseconds)} ${clock(milliseconds)}`;

// Split a model id into its organization and its name, because the name matters more.
export function nameParts(id) {
  const at = id.lastIndexOf("/") + 1;
  return [id.slice(0, at), id.slice(at)];
}
