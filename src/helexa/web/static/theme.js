// This script runs before the first paint and applies the theme that the user chose last. Other scripts change the theme
// with `window.helexaTheme`.
const root = document.documentElement;
const storage = () => {
  try {
    return window.localStorage;
  } catch {
    // The browser blocks the storage, for example in a private window. The choice then lasts until the user leaves the page.
    return null;
  }
};
const stored = storage()?.getItem("theme");
if (stored === "light" || stored === "dark") root.dataset.theme = stored;

const remember = (theme) => {
  try {
    storage()?.setItem("theme", theme);
  } catch {
    /* The storage is full. */
  }
};

window.helexaTheme = {
  get current() {
    return root.dataset.theme ?? "auto";
  },
  // Switch to the next theme in the order auto (the theme of the system), light, dark. Return the new theme.
  next() {
    const chosen = { auto: "light", light: "dark", dark: "auto" }[this.current];
    if (chosen === "auto") {
      delete root.dataset.theme;
      storage()?.removeItem("theme");
    } else {
      root.dataset.theme = chosen;
      remember(chosen);
    }
    return chosen;
  },
};
