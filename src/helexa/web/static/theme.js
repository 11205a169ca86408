// Before the first paint: apply the theme that the user chose last. Other scripts change it with `window.helexaTheme`.
const root = document.documentElement;
const storage = () => {
  try {
    return window.localStorage;
  } catch {
    return null; // blocked, as in some private modes: the choice lasts until the page is left
  }
};
const stored = storage()?.getItem("theme");
if (stored === "light" || stored === "dark") root.dataset.theme = stored;

const remember = (theme) => {
  try {
    storage()?.setItem("theme", theme);
  } catch {
    /* full */
  }
};

window.helexaTheme = {
  get current() {
    return root.dataset.theme ?? "auto";
  },
  // Change to the next theme of: as the system, light, dark.
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
