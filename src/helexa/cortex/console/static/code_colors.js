// Colors of source code. highlight.js and its languages load when a block of code needs them for the first time.

import "./vendor/purify.min.js";

// Files of highlight.js by language, with the other names that models write after ```.
const LANGUAGES = {
  bash: ["sh", "zsh"],
  c: ["h"],
  cpp: ["c++", "cc", "hpp", "cxx"],
  csharp: ["cs", "c#"],
  css: ["scss"],
  diff: ["patch"],
  dockerfile: ["docker"],
  go: ["golang"],
  ini: ["toml", "conf", "properties"],
  java: [],
  javascript: ["js", "jsx", "mjs", "cjs"],
  json: ["jsonc", "json5"],
  kotlin: ["kt", "kts"],
  lua: [],
  makefile: ["make", "mk"],
  markdown: ["md"],
  nginx: [],
  php: [],
  powershell: ["ps1", "pwsh"],
  python: ["py", "python3", "py3"],
  r: [],
  ruby: ["rb"],
  rust: ["rs"],
  shell: ["console", "shell-session"],
  sql: ["postgresql", "mysql", "sqlite"],
  swift: [],
  typescript: ["ts", "tsx"],
  xml: ["html", "svg", "xhtml", "vue"],
  yaml: ["yml"],
};
const FILES = new Map(Object.entries(LANGUAGES).flatMap(([file, names]) => [file, ...names].map((name) => [name, file])));
const LONGEST_CODE = 40_000;
const SPANS = {
  RETURN_TRUSTED_TYPE: true,
  ALLOWED_TAGS: ["span"],
  ALLOWED_ATTR: ["class"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
};

let library = null;

const fileOf = (language) => FILES.get(language.toLowerCase());
const isLoaded = (language) => Boolean(library?.getLanguage(fileOf(language)));

// Return whether the colors of a language can be loaded and are not loaded yet.
export const needsColors = (language) => Boolean(fileOf(language)) && !isLoaded(language);

// Load highlight.js and a language. Without them, code is shown without colors.
export async function loadColors(language) {
  const file = fileOf(language);
  const [core, grammar] = await Promise.all([
    import("./vendor/highlight/core.min.js"),
    import(`./vendor/highlight/${file}.min.js`),
  ]);
  library = core.default;
  if (!library.getLanguage(file)) library.registerLanguage(file, grammar.default);
}

// Return HTML of a piece of code, safe to insert into the page, or null if the code has no colors.
export function colored(text, language) {
  if (text.length > LONGEST_CODE || !isLoaded(language)) return null;
  try {
    const { value } = library.highlight(text, { language: fileOf(language), ignoreIllegals: true });
    return window.DOMPurify.sanitize(value, SPANS);
  } catch {
    return null;
  }
}
