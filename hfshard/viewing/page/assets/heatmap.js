// The heat maps of a diff: layers x kinds of tensors for each stack, shaded by relative norm, by mouse and by keyboard.

const MOST_WIDE = 24; // layers that all have their number; of more, some have
const MOST_NARROW = 9; // the same on a narrow screen
const SIDES = { "-1": "below the scale", 1: "above the scale" };

let pointedCell = null; // with the tip, which follows it when the page is scrolled

addEventListener("scroll", () => pointedCell && placeTip(pointedCell.getBoundingClientRect()), { passive: true, capture: true });

/** What a cell says: the kind of its tensors' differences, by how much, and how many of them differ. */
function cellFacts(stack, row, column) {
  const norm = stack.norms[row][column];
  const part = stack.parts[row][column];
  const facts = [data.words[stack.worst[row][column]]];
  if (norm !== null) facts.push(typeof norm === "string" ? norm : `relative norm ${formatNorm(norm)}`);
  if (norm !== null && stack.sides[row][column]) facts.push(SIDES[stack.sides[row][column]]);
  if (part) facts.push(`${formatCount(part[0])} of ${countOf(part[1], "tensor")} differ`);
  return facts;
}

function cellOf(stack, row, column) {
  const kind = stack.worst[row][column];
  const cell = make("td", "");
  if (kind < 0) {
    cell.className = "none";
    return cell;
  }
  const part = stack.parts[row][column];
  cell.className = `k-${data.kinds[kind]}`;
  if (stack.norms[row][column] !== null && data.kinds[kind] === "changed") {
    cell.classList.add(`s${stack.shades[row][column]}`);
    if (stack.sides[row][column]) cell.classList.add(stack.sides[row][column] > 0 ? "above" : "below");
  }
  if (isPartial(part)) {
    cell.classList.add("part");
    cell.style.setProperty("--share", `${(100 * part[0]) / part[1]}%`);
  }
  cell.setAttribute("aria-label", `layer ${stack.layers[column]}, ${stack.kinds[row]}: ${cellFacts(stack, row, column).join(", ")}`);
  cell.setAttribute("role", "gridcell");
  cell.tabIndex = -1;
  cell.dataset.cell = stack.first + row * stack.layers.length + column;
  cell.dataset.at = `${row} ${column}`;
  return cell;
}

function headsOf(layers) {
  const every = Math.ceil(layers.length / 40);
  return layers.map((layer, at) => make("th", "", at % every || (every > 1 && at + 2 > layers.length) ? "" : String(layer)));
}

/** The kind that all cells of a stack have, so that there is nothing to see; null if they tell parts of it apart. */
function uniformKind(stack) {
  const kinds = new Set(stack.worst.flat());
  kinds.delete(-1);
  return kinds.size === 1 && stack.norms.flat().every((norm) => norm === null) && !stack.parts.flat().some(isPartial) ? [...kinds][0] : null;
}

const isPartial = (part) => part && part[0] < part[1] && part[0] > 0;
const uniformWords = (stack) => `${data.words[uniformKind(stack)]} in all ${countOf(stack.layers.length, "layer")}`;

/** Draw a stack; `onChoose` gets the chosen cell and its name, or null for none. */
function drawStack(stack, onChoose) {
  const isMany = stack.layers.length > MOST_WIDE;
  const table = make("table", `grid ${isMany ? "many" : stack.layers.length > MOST_NARROW ? "some" : ""}`);
  table.setAttribute("role", "grid");
  table.setAttribute("aria-label", stack.name || "layers");
  table.style.setProperty("--layers", stack.layers.length);
  table.append(make("thead", "", make("tr", "", make("th", "name", ...nameText(stack.name || "layers")), ...headsOf(stack.layers))));
  const cells = stack.kinds.map((_, row) => stack.layers.map((_, column) => cellOf(stack, row, column)));
  const hasRoles = stack.roles.some((role) => role !== "other");
  stack.kinds.forEach((kind, row) => {
    if (row === 0 || stack.roles[row] !== stack.roles[row - 1]) {
      table.append(make("tbody", ""));
      const role = make("th", "", stack.roles[row]);
      role.colSpan = stack.layers.length + 1;
      role.scope = "rowgroup";
      if (hasRoles) table.lastChild.append(make("tr", "role", role));
    }
    const head = make("th", "name", ...nameText(kind));
    head.scope = "row";
    table.lastChild.append(make("tr", "", head, ...cells[row]));
  });
  const first = cells.flat().find((cell) => cell.dataset.cell);
  if (first) first.tabIndex = 0;

  const cellAt = (event) => event.target.closest("td[data-cell]");
  const placeOf = (cell) => cell.dataset.at.split(" ").map(Number);
  const nameOf = ([row, column]) => [stack.name, stack.layers[column], stack.kinds[row]].filter((part) => part !== "").join(".");
  const point = (cell) => {
    pointedCell = cell;
    if (!cell) return showTip(null);
    const at = placeOf(cell);
    showTip(cell.getBoundingClientRect(), nameOf(at), cellFacts(stack, ...at).join(" · "));
  };
  const onKey = (event) => {
    const cell = cellAt(event);
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!cell) return;
    if (event.key === "Enter" || event.key === " ") onChoose(cell, nameOf(placeOf(cell)));
    else if (event.key === "Escape") onChoose(null);
    else if (step) {
      let [row, column] = placeOf(cell);
      do {
        row += step[0];
        column += step[1];
      } while (cells[row]?.[column]?.matches(".none"));
      const next = cells[row]?.[column];
      if (!next) return;
      cell.tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    } else return;
    event.preventDefault();
  };
  table.addEventListener("click", (event) => {
    const cell = cellAt(event);
    if (cell) onChoose(cell, nameOf(placeOf(cell)));
  });
  table.addEventListener("keydown", onKey);
  table.addEventListener("mouseover", (event) => point(cellAt(event)));
  table.addEventListener("mouseleave", () => point(null));
  table.addEventListener("focusin", (event) => point(cellAt(event)));
  table.addEventListener("focusout", () => point(null));
  const box = make(uniformKind(stack) === null ? "div" : "details", "scroll", table);
  if (box.matches("details")) box.prepend(make("summary", "", ...nameText(table.ariaLabel), `: ${uniformWords(stack)}`));
  if (stack.more) box.append(make("p", "quiet", `and ${formatCount(stack.more)} more layers or kinds`));
  return box;
}
