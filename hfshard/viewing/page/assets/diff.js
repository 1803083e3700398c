// The table of a diff: rows of layers that changed alike, which open; a cell, words and kinds narrow it down.

const MOST_ROWS = 200; // of the table; all are counted
const NAME = 0, KIND = 1, CELL = 2, FOLD = 3, DTYPE = 4, SHAPE = 5, OLD = 6, SHADE = 7, NORM = 8, MAX = 9, TURN = 10, CHANGED = 11,
  ELEMENTS = 12, ODD = 13;
const chosenKinds = new Set(data.kinds.map((_, number) => number));
const openFolds = new Set();
let chosenCell = null; // its number
let isFolded = data.folds.length > 0;
let order = null; // [column, isDescending]; null: the largest first, as in the data

/** Numbers of three digits; small ones with an exponent. */
function formatNumber(value) {
  if (value === null || value === undefined || typeof value === "string") return value ?? "";
  if (value === 0) return "0";
  return Math.abs(value) < 1e-4 || Math.abs(value) >= 1e6 ? value.toExponential(2) : value.toPrecision(3);
}

/** A relative norm as a percentage; a text, as for a change from zero, stays. */
function formatNorm(norm) {
  if (typeof norm !== "number") return norm ?? "";
  const percent = 100 * norm;
  return `${percent >= 1000 && percent < 1e6 ? formatCount(Math.round(percent)) : formatNumber(percent)} %`;
}

/** The largest number of a list; a text, as for a change from zero, only where there is no number. */
function largest(values) {
  const numbers = values.filter((value) => typeof value === "number");
  return numbers.length ? Math.max(...numbers) : (values.find((value) => typeof value === "string") ?? null);
}

/** A line of the table: one tensor, or several that are folded; numbers are the largest of theirs. */
function lineOf(tensors, label) {
  const [first] = tensors;
  const sum = (at) => tensors.reduce((total, tensor) => total + (tensor[at] ?? 0), 0);
  return {
    tensors, label, kind: first[KIND], dtype: first[DTYPE], shape: first[SHAPE],
    shade: largest(tensors.map((tensor) => tensor[SHADE])),
    norm: largest(tensors.map((tensor) => tensor[NORM])),
    max: largest(tensors.map((tensor) => tensor[MAX])),
    turn: largest(tensors.map((tensor) => tensor[TURN])),
    changed: sum(CHANGED), elements: sum(ELEMENTS),
  };
}

const sortKeys = {
  name: (line) => line.label.toLowerCase(),
  norm: (line) => (typeof line.norm === "number" ? line.norm : null),
  max: (line) => (typeof line.max === "string" ? Infinity : line.max),
  turn: (line) => (typeof line.turn === "number" ? line.turn : null),
  share: (line) => (line.elements ? line.changed / line.elements : null),
  kind: (line) => data.words[line.kind],
  dtype: (line) => line.dtype.toLowerCase(),
  shape: (line) => line.shape,
};

const cellMakers = {
  norm: (line) => {
    const cell = make("td", "number", formatNorm(line.norm));
    if (line.norm !== null && data.kinds[line.kind] === "changed") cell.prepend(make("i", `key k-changed s${line.shade}`));
    return cell;
  },
  max: (line) => make("td", "number", formatNumber(line.max)),
  turn: (line) => make("td", "number", formatNumber(line.turn)),
  share: (line) => make("td", "number", line.elements ? formatShare(line.changed, line.elements) : ""),
  kind: (line) => make("td", "shape", make("i", `key k-${data.kinds[line.kind]}`), data.words[line.kind]),
  dtype: (line) => make("td", "shape", line.dtype),
  shape: (line) => make("td", "shape", line.shape),
};

function nameCell(line, button) {
  const name = make("span", "name", ...nameText(line.label));
  const cell = make("td", "", make("div", "", ...(button ? [button] : []), name));
  if (button) cell.firstChild.append(" ", make("span", "count", `${formatCount(line.tensors.length)} tensors`));
  if (line.tensors.length === 1) {
    const [tensor] = line.tensors;
    if (tensor[OLD]) cell.append(make("small", "name", "was ", ...nameText(tensor[OLD])));
    if (tensor[ODD]) cell.append(make("small", "", `NaN ${tensor[ODD][0]} → ${tensor[ODD][1]}, inf ${tensor[ODD][2]} → ${tensor[ODD][3]}`));
  }
  return cell;
}

/** The rows of a line: itself, and below it, if it is folded and open, its tensors. */
function rowsOf(line) {
  const rowOf = (one, button, classes = "") =>
    make("tr", classes, nameCell(one, button), ...data.columns.map((column) => cellMakers[column](one)));
  const innerRows = () => {
    const lines = sorted(line.tensors.map((tensor) => lineOf([tensor], tensor[NAME])));
    const rows = lines.slice(0, MOST_ROWS).map((one) => rowOf(one, null, "inner"));
    if (lines.length > MOST_ROWS) {
      const rest = make("td", "", make("small", "", `and ${formatCount(lines.length - MOST_ROWS)} more: search for them`));
      rest.colSpan = data.columns.length + 1;
      rows.push(make("tr", "inner", rest));
    }
    return rows;
  };
  if (line.tensors.length === 1) return [rowOf(line)];
  const fold = line.tensors[0][FOLD];
  const button = make("button", "fold");
  button.type = "button";
  button.setAttribute("aria-label", `Tensors of ${line.label}`);
  const row = rowOf(line, button);
  let inner = [];
  const open = (isOpen) => {
    button.setAttribute("aria-expanded", String(isOpen));
    for (const one of inner) one.remove();
    inner = isOpen ? innerRows() : [];
    row.after(...inner);
  };
  button.addEventListener("click", () => {
    if (!openFolds.delete(fold)) openFolds.add(fold);
    open(openFolds.has(fold));
  });
  open(openFolds.has(fold));
  return [row, ...inner];
}

function sorted(lines) {
  if (!order) return lines;
  const [column, isDescending] = order;
  const key = sortKeys[column];
  return lines.map((line) => [key(line), line]).sort(([one], [other]) => compareValues(one, other, isDescending)).map(([, line]) => line);
}

/** Lines of tensors: folded, unless only some are looked for. */
function linesOf(found, folds) {
  const groups = new Map();
  for (const tensor of found) {
    const key = folds && tensor[FOLD] >= 0 ? tensor[FOLD] : tensor;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(tensor);
  }
  return [...groups.values()].map((tensors) => lineOf(tensors, tensors.length > 1 ? data.folds[tensors[0][FOLD]] : tensors[0][NAME]));
}

function drawTable() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = data.tensors.filter((tensor) => {
    if (!chosenKinds.has(tensor[KIND]) || (chosenCell !== null && tensor[CELL] !== chosenCell)) return false;
    const text = `${tensor[NAME]} ${tensor[OLD]}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const lines = sorted(linesOf(found, isFolded && !words.length && chosenCell === null));
  byId("list").replaceChildren(...lines.slice(0, MOST_ROWS).flatMap(rowsOf));
  const rows = lines.length < found.length ? ` in ${countOf(lines.length, "row")}` : "";
  const more = lines.length > MOST_ROWS ? `, the first ${MOST_ROWS} above` : "";
  const note = rows && data.columns.includes("norm") ? ". A folded row has the largest number of its tensors." : "";
  byId("shown").textContent = found.length ? `${countOf(found.length, "tensor")}${rows}${more}${note}` : "Nothing here differs.";
}

function choose(cell, name) {
  document.querySelector("td[aria-selected]")?.removeAttribute("aria-selected");
  const number = cell ? Number(cell.dataset.cell) : null;
  chosenCell = number === chosenCell ? null : number;
  if (chosenCell !== null) cell.setAttribute("aria-selected", "true");
  byId("chosen").hidden = chosenCell === null;
  byId("chosen-name").textContent = name ?? "";
  drawTable();
}

byId("grids").hidden = !data.stacks.length;
byId("stacks").append(...data.stacks.map((stack) => drawStack(stack, choose)));
byId("search").hidden = false;
byId("search").addEventListener("input", drawTable);
byId("all").addEventListener("click", () => choose(null));
for (const chip of document.querySelectorAll("[data-kind]")) {
  chip.addEventListener("click", () => {
    const kind = data.kinds.indexOf(chip.dataset.kind);
    if (!chosenKinds.delete(kind)) chosenKinds.add(kind);
    chip.setAttribute("aria-pressed", String(chosenKinds.has(kind)));
    drawTable();
  });
}
byId("folding")?.addEventListener("click", (event) => {
  isFolded = !isFolded;
  event.currentTarget.textContent = isFolded ? "Unfold layers" : "Fold layers";
  drawTable();
});
makeSortable(byId("list").closest("table"), (column, isDescending) => {
  order = [["name", ...data.columns][column], isDescending];
  drawTable();
});
drawTable();
