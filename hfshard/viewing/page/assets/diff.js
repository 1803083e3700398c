// The page of a diff: a grid of layers x kinds for each stack, and a list that clicks, words and kinds narrow down.

const MOST_ROWS = 200; // of the list; all are counted
const MOST_WIDE = 24; // layers whose cells are as wide as they like; more share the width of the page
const wordsOf = (kind) => data.words[kind];
const chosenKinds = new Set(data.kinds.map((_, number) => number));
let chosenCell = null; // { id, words }

function normWords(norm) {
  if (norm === null) return "";
  return typeof norm === "string" ? `, ${norm}` : `, relative norm ${norm}`;
}

function cellOf(stack, row, column) {
  const kind = stack.worst[row][column];
  const cell = make("td", "");
  if (kind < 0) {
    cell.className = "none";
    return cell;
  }
  const norm = stack.norms[row][column];
  const isShaded = norm !== null && data.kinds[kind] === "changed";
  cell.className = `k-${data.kinds[kind]} ${isShaded ? `s${stack.shades[row][column]}` : ""}`;
  const words = `layer ${stack.layers[column]}, ${stack.kinds[row]}: ${wordsOf(kind)}${normWords(norm)}`;
  cell.title = words;
  cell.setAttribute("aria-label", words);
  cell.setAttribute("role", "gridcell");
  cell.tabIndex = -1;
  cell.dataset.cell = stack.first + row * stack.layers.length + column;
  cell.dataset.words = `${stack.name ? `${stack.name}, ` : ""}${words}`;
  return cell;
}

function drawStack(stack) {
  const every = Math.ceil(stack.layers.length / 40);
  const table = make("table", stack.layers.length > MOST_WIDE ? "grid many" : "grid", make("caption", "name", stack.name || "layers"));
  table.setAttribute("role", "grid");
  if (stack.layers.length > MOST_WIDE) table.style.minWidth = `calc(7rem + ${3 * stack.layers.length}px)`;
  const heads = stack.layers.map((layer, number) => make("th", "", number % every || (every > 1 && number + 2 > stack.layers.length) ? "" : String(layer)));
  table.append(make("thead", "", make("tr", "", make("th", ""), ...heads)));
  const body = make("tbody", "");
  stack.kinds.forEach((kind, row) => {
    const head = make("th", "name", ...nameText(kind));
    head.scope = "row";
    body.append(make("tr", "", head, ...stack.layers.map((_, column) => cellOf(stack, row, column))));
  });
  table.append(body);
  const first = table.querySelector("td[data-cell]");
  if (first) first.tabIndex = 0;
  table.addEventListener("click", (event) => choose(event.target.closest("td[data-cell]")));
  table.addEventListener("keydown", onKey);
  const box = make("div", "scroll", table);
  if (stack.more) box.append(make("p", "quiet", `and ${formatCount(stack.more)} more layers or kinds`));
  return box;
}

function onKey(event) {
  const cell = event.target.closest("td[data-cell]");
  if (!cell) return;
  const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  if (event.key === "Enter" || event.key === " ") choose(cell);
  else if (event.key === "Escape") choose(null);
  else if (step) {
    let next = cell;
    do {
      const row = step[0] > 0 ? next.parentNode.nextSibling : step[0] < 0 ? next.parentNode.previousSibling : next.parentNode;
      next = row?.children[next.cellIndex + step[1]];
    } while (next?.matches("td.none"));
    if (!next?.matches("td[data-cell]")) return;
    cell.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  } else return;
  event.preventDefault();
}

function choose(cell) {
  document.querySelector("td[aria-selected]")?.removeAttribute("aria-selected");
  const isAgain = cell && chosenCell?.id === Number(cell.dataset.cell);
  chosenCell = cell && !isAgain ? { id: Number(cell.dataset.cell), words: cell.dataset.words } : null;
  if (chosenCell) cell.setAttribute("aria-selected", "true");
  byId("chosen").textContent = chosenCell ? `${chosenCell.words} (Escape: all)` : "";
  drawList();
}

function rowOf([name, kind, , what, old, norm, most, cosine, changed, odd]) {
  const title = make("td", "", make("div", "name", ...nameText(name)), ...(old ? [make("small", "name", "was ", ...nameText(old))] : []));
  const sign = make("i", `key k-${data.kinds[kind]}`);
  const row = make("tr", "", title, make("td", "shape", sign, wordsOf(kind)), make("td", "shape", what));
  if (document.querySelectorAll("thead th[scope=col]").length <= 3) return row;
  const share = changed === undefined ? "" : `${(100 * changed).toFixed(1)} %`;
  row.append(...[norm, most, cosine, share].map((value) => make("td", "number", value ?? "")));
  if (odd?.some(Boolean)) row.lastChild.append(make("small", "", `NaN ${odd[0]} → ${odd[1]}, inf ${odd[2]} → ${odd[3]}`));
  return row;
}

function drawList() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = data.tensors.filter(([name, kind, cell, , old]) => {
    if (!chosenKinds.has(kind) || (chosenCell && cell !== chosenCell.id)) return false;
    const text = `${name} ${old}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  byId("list").replaceChildren(...found.slice(0, MOST_ROWS).map(rowOf));
  const more = found.length > MOST_ROWS ? `, the first ${MOST_ROWS} above` : "";
  byId("shown").textContent = found.length ? `${countOf(found.length, "tensor")}${more}` : "Nothing here differs.";
}

byId("grids").hidden = !data.stacks.length;
byId("stacks").append(...data.stacks.map(drawStack));
byId("search").hidden = false;
byId("search").addEventListener("input", drawList);
for (const chip of document.querySelectorAll("[data-kind]")) {
  chip.addEventListener("click", () => {
    const kind = data.kinds.indexOf(chip.dataset.kind);
    if (!chosenKinds.delete(kind)) chosenKinds.add(kind);
    chip.setAttribute("aria-pressed", String(chosenKinds.has(kind)));
    drawList();
  });
}
drawList();
