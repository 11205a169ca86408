// A table of values. In a narrow window, each row becomes a block: its name and its actions, then its labeled values.

import { html } from "./lib.js";

// The roles keep the table a table for screen readers, because the style sheet changes how narrow tables are displayed.
// `columns`: {title, kind}, null columns are left out. The first column names the row. Kinds: "n" for numbers, "actions",
// "lead" for values that need no label in a block, "wrap" for texts. `rows`: {key, cells, kind}; a cell that is null has no value.
export function Table({ label, columns, rows, kind = "" }) {
  const shown = columns.filter(Boolean);
  return html`<table role="table" aria-label=${label} class=${`stack ${kind}`}>
    <thead role="rowgroup"><tr role="row">${shown.map((column) => html`<th scope="col" role="columnheader" class=${column.kind ?? ""}>${column.kind === "actions" ? html`<span class="unseen">${column.title}</span>` : column.title}</th>`)}</tr></thead>
    <tbody role="rowgroup">${rows.map((row) => {
      const [name, ...cells] = row.cells.filter((_, index) => columns[index]);
      return html`<tr key=${row.key} role="row" class=${row.kind ?? ""}><th scope="row" role="rowheader">${name}</th>${cells.map(
        (cell, index) => {
          const { title, kind: cellKind = "" } = shown[index + 1];
          return html`<td role="cell" class=${cell == null ? `${cellKind} none` : cellKind} data-label=${/actions|lead/.test(cellKind) ? undefined : title}>${cell ?? "–"}</td>`;
        },
      )}</tr>`;
    })}</tbody></table>`;
}
