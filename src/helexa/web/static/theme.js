// Before the first paint: apply the theme that the user chose last. Other scripts change it with `window.helexaTheme`.
const root = document.documentElement;
const stored = localStorage.getItem("theme");
if (stored === "light" || stored === "dark") root.dataset.theme = stored;

window.helexaTheme = {
  get current() {
    return root.dataset.theme ?? "auto";
  },
  // Change to the next theme of: as the system, light, dark.
  next() {
    const chosen = { auto: "light", light: "dark", dark: "auto" }[this.current];
    if (chosen === "auto") {
      delete root.dataset.theme;
      localStorage.removeItem("theme");
    } else {
      root.dataset.theme = chosen;
      localStorage.setItem("theme", chosen);
    }
    return chosen;
  },
};
