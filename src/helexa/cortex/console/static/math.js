// Formulas. KaTeX loads when an answer contains the first formula. It builds elements, not HTML, from TeX, and may not
// make links or load images (`trust`). A formula that it cannot read stays as TeX.

const OPTIONS = { throwOnError: true, trust: false, strict: "ignore", maxExpand: 200, maxSize: 20 };
const LONGEST_FORMULA = 4000;
const MOST_FORMULAS = 300; // per block of text

let library = null;
let loading = null;

export const needsMath = () => library === null;

export function loadMath() {
  loading ??= import("./vendor/katex/katex.min.js").then(() => {
    const style = document.createElement("link");
    style.rel = "stylesheet";
    style.href = new URL("./vendor/katex/katex.min.css", import.meta.url).href;
    document.head.append(style);
    library = window.katex;
  });
  return loading;
}

// Replace the elements `code.math` in an element by their formulas, once KaTeX is loaded.
export function showFormulas(element) {
  if (!library) return;
  for (const source of [...element.querySelectorAll("code.math")].slice(0, MOST_FORMULAS)) {
    const formula = document.createElement("span");
    formula.className = source.classList.contains("display") ? "formula display" : "formula";
    if (renderFormula(formula, source.textContent, source.classList.contains("display"))) source.replaceWith(formula);
  }
}

function renderFormula(element, tex, displayMode) {
  if (tex.length > LONGEST_FORMULA) return false;
  try {
    library.render(tex, element, { ...OPTIONS, displayMode });
    return true;
  } catch {
    return false;
  }
}
