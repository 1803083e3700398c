// The map: what is in one module, by bytes. Only what can be seen is drawn.

const MOST_CELLS = 1500; // elements of the whole map
const SMALLEST = 24; // square pixels
const HEADER = 19; // pixels of a line of text
const LINE = 16; // of a label of several
const HEADED_LEVELS = 2; // levels whose modules have a line of their own; the tensors below name the rest of the way
const CROWDED = 200; // cells of a map whose items are all too small to be told apart
const CROWDED_SHARE = 0.85; // of its width; all the others have the rest, which is not to scale then
const NEARLY_ALL = 0.8; // a module with so much of what is shown counts for no level: "model", "model.layers"
const NARROWEST_LABEL = 30;
const NARROWEST_CHARACTER = 3; // pixels
const CHARACTER = 7; // pixels, about
const EASILY_SEEN = 10; // pixels of the sides of a cell that is chosen from elsewhere; a smaller one is shown closer
const GAP = 2;

// Paul Tol's "light" scheme, made for labelled cells, and "iridescent" for many files, in their order: people who are
// colour-blind can tell them apart, and dark text on each has a contrast of 4.5 or more.
const COLOURS = ["#77aadd", "#ee8866", "#44bb99", "#eedd88", "#ffaabb", "#99ddff", "#bbcc33", "#aaaa00", "#dddddd"];
const RAMP = ["#ddecbf", "#c2e3d2", "#a8d8dc", "#8dcbe4", "#7eb2e4", "#88a5dd", "#9398d2", "#9b8ac4"];
const INK = "#1d2024";

/** The colour of one of so many: of a few each its own, of many a place on a ramp. */
function colourOf(number, count) {
  if (count <= COLOURS.length) return COLOURS[number];
  const place = (number / (count - 1)) * (RAMP.length - 1);
  const at = Math.min(Math.floor(place), RAMP.length - 2);
  const part = (text, channel) => parseInt(text.slice(1 + 2 * channel, 3 + 2 * channel), 16);
  const mixed = [0, 1, 2].map((channel) => {
    const from = part(RAMP[at], channel);
    return Math.round(from + (part(RAMP[at + 1], channel) - from) * (place - at));
  });
  return `rgb(${mixed.join(" ")})`;
}

/**
 * Draw a map into an element, and let people move in it.
 *
 * @param tree From makeTree.
 * @param onItem Called with the item that was chosen or has the focus.
 * @returns {go, reveal, paintBy}
 */
function makeTreemap(tree, onItem) {
  const root = byId("treemap");
  let view = { node: 0, from: 0 }; // `from`: how many of the largest items are left out, to show smaller ones
  let column = "dtype";
  let items = [];
  let cells = []; // the elements of the first level: {element, item, box}; the last may be the rest, without an item
  let shownBytes = 0;
  let left = 0; // elements that may still be drawn
  let chosen = null; // the tensor that is outlined
  const itemOfElement = new WeakMap();
  let cellOfItem = new Map(); // each that is drawn, at any level
  let labels = []; // {element, name, width, lines, above, isBold}, to be written when all are known

  const numberOf = () => tree.colours[column].length;

  function colourOfItem(item) {
    let best = 0;
    let most = -1;
    for (const [key, bytes] of tree.sharesOf(item, column)) if (bytes > most) [best, most] = [key, bytes];
    return colourOf(best, numberOf());
  }

  function factsOf(item) {
    const size = formatSize(tree.bytesOf(item));
    if (!tree.isLeaf(item)) return `${countOf(tree.tensorsOf(item), "tensor")}, ${size}`;
    const [dtype, shape] = tree.kindOf(item);
    return `${tree.dtypes[dtype]} ${shapeText(shape)}, ${size}`;
  }

  function place(element, box, w, h) {
    Object.assign(element.style, {
      left: `${(100 * box.x) / w}%`,
      top: `${(100 * box.y) / h}%`,
      width: `${(100 * box.w) / w}%`,
      height: `${(100 * box.h) / h}%`,
    });
  }

  function paint({ element, item }) {
    element.style.background = colourOfItem(item);
    element.style.color = INK;
  }

  /** One cell, without what is in it; `above`: the module whose name its own goes on. */
  function makeCell(item, box, tag, classes, level, above) {
    const node = tree.nodeOf(item);
    const holds = !tree.isLeaf(item) && box.w >= 14 && box.h >= 14;
    const isWide = box.w >= NARROWEST_LABEL;
    const isHeaded = holds && level < HEADED_LEVELS && isWide && box.h >= 2.5 * HEADER;
    const element = make(tag, `cell ${classes} ${holds ? "module" : "tensor"}`);
    if (!holds) paint({ element, item });
    const cell = { element, item, box, holds, level, isHeaded, name: tree.nameBelow(node, above), above: isHeaded ? node : above };
    if (isHeaded || (!holds && isWide && box.h >= HEADER)) {
      const lines = isHeaded ? 1 : Math.min(3, Math.floor((box.h - 3) / LINE));
      labels.push({ element, name: cell.name, width: box.w - 10, lines, above, isBold: holds });
    }
    itemOfElement.set(element, item);
    cellOfItem.set(item, cell);
    return cell;
  }

  /** Write the labels: in those below one module that begin alike, a word has one form. */
  function writeLabels() {
    const groups = new Map();
    for (const one of labels) {
      const key = `${one.above} ${one.isBold} ${one.name.split(".")[0]}`;
      if (groups.has(key)) groups.get(key).push(one);
      else groups.set(key, [one]);
    }
    const family = getComputedStyle(root).fontFamily;
    for (const group of groups.values()) {
      pen.font = `${group[0].isBold ? 600 : 400} 12px ${family}`;
      shortenedAlike(group).forEach((text, number) => {
        const { element, lines } = group[number];
        element.prepend(make("span", lines > 1 ? "label lines" : "label", ...(lines > 1 ? nameText(text) : [text])));
      });
    }
  }

  /** A module that is not drawn further: a colour, and the number of its parts. */
  function close(cell, parts) {
    paint(cell);
    if (cell.box.w < NARROWEST_LABEL || cell.box.h < 2 * HEADER) return;
    const count = countOf(parts, "part");
    const text = cell.isHeaded ? count : `${cell.name}: ${count}`;
    cell.element.append(make("span", "label lines", ...nameText(text)));
  }

  /** How the contents of a cell are divided, which is drawn if there are elements left for it. */
  function divided(cell) {
    const gap = cell.level < HEADED_LEVELS ? GAP : 0;
    const header = cell.isHeaded ? HEADER : gap;
    const inner = { x: gap, y: header, w: cell.box.w - 2 * gap, h: cell.box.h - header - gap };
    const within = tree.itemsIn(cell.item);
    return { cell, within, ...squarify(within.map(tree.bytesOf), inner, MOST_CELLS, SMALLEST) };
  }

  function fill({ cell, within, boxes, rest }) {
    left -= boxes.length;
    if (rest && rest.w * rest.h > 1) { // what is too small to be drawn is there as a colour
      const element = make("span", "cell inner");
      paint({ element, item: cell.item });
      place(element, rest, cell.box.w, cell.box.h);
      cell.element.append(element);
    }
    const level = cell.level + (tree.bytesOf(cell.item) > NEARLY_ALL * shownBytes ? 0 : 1);
    return boxes.map((box, number) => {
      const below = makeCell(within[number], box, "span", "inner", level, cell.above);
      place(below.element, box, cell.box.w, cell.box.h);
      cell.element.append(below.element);
      return below;
    });
  }

  /**
   * Draw what is in the cells of one level, and return the cells of the next. Cells with as many parts are drawn alike,
   * all of them or none, so that layers of one kind look the same however many there are.
   */
  function fillLevel(level) {
    const alike = new Map();
    for (const one of level.map(divided)) {
      const count = one.within.length;
      if (alike.has(count)) alike.get(count).push(one);
      else alike.set(count, [one]);
    }
    const next = [];
    for (const [count, group] of [...alike].sort(([one], [other]) => one - other)) {
      const boxes = group.reduce((sum, one) => sum + one.boxes.length, 0);
      if (boxes > left) for (const { cell } of group) close(cell, count);
      else for (const one of group) next.push(...fill(one));
    }
    return next.filter((cell) => cell.holds);
  }

  /** The boxes of the first level. There is at least one: who chooses the rest sees others each time. */
  function divide(w, h) {
    const sizes = items.map(tree.bytesOf);
    const found = squarify(sizes, { x: 0, y: 0, w, h }, MOST_CELLS / 2, SMALLEST);
    if (found.boxes.length) return found;
    const wide = w * CROWDED_SHARE;
    const { boxes } = squarify(sizes.slice(0, CROWDED), { x: 0, y: 0, w: wide, h }, CROWDED, 0);
    return { boxes, rest: { x: wide, y: 0, w: w - wide, h } };
  }

  function draw() {
    const [w, h] = [root.clientWidth, root.clientHeight];
    items = tree.itemsIn(view.node).slice(view.from);
    cells = [];
    cellOfItem = new Map();
    labels = [];
    left = MOST_CELLS;
    shownBytes = items.reduce((sum, item) => sum + tree.bytesOf(item), 0);
    root.replaceChildren();
    root.toggleAttribute("data-empty", !items.length);
    if (!items.length || !w || !h) return;
    const { boxes, rest } = divide(w, h);
    left -= boxes.length;
    cells = boxes.map((box, number) => makeCell(items[number], box, "button", "top", 0, view.node));
    if (rest && rest.w * rest.h > 1) cells.push(makeRest(rest, boxes.length));
    for (const cell of cells) {
      cell.element.type = "button";
      cell.element.tabIndex = -1;
      place(cell.element, cell.box, w, h);
      if (cell.item !== null) cell.element.setAttribute("aria-label", `${tree.nameOf(tree.nodeOf(cell.item))}, ${factsOf(cell.item)}`);
    }
    cells[0].element.tabIndex = 0;
    for (let level = cells.filter((cell) => cell.holds); level.length;) level = fillLevel(level);
    writeLabels();
    root.append(...cells.map((cell) => cell.element));
    outline();
  }

  /** Mark the cell of the chosen tensor, where it is drawn. */
  function outline() {
    for (const marked of root.querySelectorAll(".chosen")) marked.classList.remove("chosen");
    cellOfItem.get(chosen)?.element.classList.add("chosen");
  }

  function makeRest(box, shown) {
    const element = make("button", "cell top rest");
    const text = `${formatCount(items.length - shown)} more`;
    if (box.w >= 60 && box.h >= HEADER) element.append(make("span", "label", text));
    element.setAttribute("aria-label", text);
    return { element, item: null, box, holds: false, from: view.from + shown };
  }

  function drawCrumbs() {
    const path = [];
    for (let node = view.node; node >= 0; node = tree.parent[node]) path.unshift(node);
    const crumbs = path.flatMap((node, number) => {
      const isHere = number === path.length - 1 && !view.from;
      const crumb = make(isHere ? "span" : "button", isHere ? "name" : "name link", tree.labelOf(node));
      if (isHere) crumb.setAttribute("aria-current", "location");
      else crumb.addEventListener("click", () => go({ node, from: 0 }));
      return number ? [make("span", "separator", "›"), crumb] : [crumb];
    });
    if (view.from) crumbs.push(make("span", "separator", "›"), make("span", "name", `${formatCount(items.length)} more`));
    const share = formatShare(shownBytes, tree.bytesOf(0));
    byId("crumbs").replaceChildren(...crumbs, make("span", "size", `${formatSize(shownBytes)} · ${share}`));
  }

  function drawLegend() {
    const shares = [...tree.sharesOf(0, column)].sort((one, other) => one[0] - other[0]);
    const names = tree.colours[column];
    const swatch = (number) => {
      const mark = make("i", "");
      mark.style.background = colourOf(number, numberOf());
      return mark;
    };
    if (numberOf() > COLOURS.length) {
      const ramp = make("i", "ramp");
      ramp.style.background = `linear-gradient(to right, ${RAMP.join(", ")})`;
      byId("legend").replaceChildren(make("span", "", ramp, `from the first ${column} to the last of ${numberOf()}`));
      return;
    }
    const entries = shares.map(([number, bytes]) => make("span", "name", swatch(number), `${names[number]} · ${formatSize(bytes)}`));
    byId("legend").replaceChildren(...entries);
  }

  /** Show another view; `focused`: the item whose cell is to have the focus. */
  function go(next, focused = null) {
    view = next;
    chosen = null;
    draw();
    drawCrumbs();
    showTip(null);
    const cell = cells.find((one) => one.item === focused) ?? cells[0];
    if (cell && focused !== null) focusOn(cell);
    else onItem(view.node);
    announce(`${view.node ? tree.nameOf(view.node) : "all modules"}, ${countOf(items.length, "part")}`);
  }

  function goOut() {
    if (view.from) go({ node: view.node, from: 0 }, tree.itemsIn(view.node)[0]);
    else if (view.node) go({ node: tree.parent[view.node], from: 0 }, view.node);
  }

  /** Go into a cell of the first level, or choose the tensor in it that was pressed: the map stays then. */
  function choose(cell, pressed) {
    const item = itemOfElement.get(pressed) ?? cell.item;
    if (cell.item === null) go({ node: view.node, from: cell.from }, tree.itemsIn(view.node)[cell.from]);
    else if (tree.isLeaf(item)) focusOn(cell, item);
    else go({ node: item, from: 0 }, tree.itemsIn(item)[0]);
  }

  function focusOn(cell, item = cell.item) {
    for (const one of cells) one.element.tabIndex = one === cell ? 0 : -1;
    cell.element.focus({ preventScroll: false });
    if (item === null) return;
    chosen = tree.isLeaf(item) ? item : null;
    outline();
    onItem(item);
    if (item !== cell.item) announce(`${tree.nameOf(tree.nodeOf(item))}, ${factsOf(item)}`);
  }

  /** The nearest cell in a direction. */
  function neighbour(cell, dx, dy) {
    const along = (box) => (dx ? [box.x, box.x + box.w] : [box.y, box.y + box.h]);
    const across = (box) => (dx ? [box.y, box.y + box.h] : [box.x, box.x + box.w]);
    let best = null;
    let least = Infinity;
    for (const other of cells) {
      const ahead = dx + dy > 0 ? along(other.box)[0] - along(cell.box)[1] : along(cell.box)[0] - along(other.box)[1];
      if (other === cell || ahead < -1) continue;
      const [from, to] = across(cell.box);
      const [otherFrom, otherTo] = across(other.box);
      const aside = Math.max(0, otherFrom - to, from - otherTo) + (otherFrom <= from && from < otherTo ? 0 : 1);
      const distance = Math.max(0, ahead) + 3 * aside;
      if (distance < least) [best, least] = [other, distance];
    }
    return best;
  }

  /** Outline an item where it is drawn; if it is too small to be seen there, show the module that it is in. */
  function reveal(item) {
    const drawn = cellOfItem.get(item);
    if (!drawn || Math.min(drawn.box.w, drawn.box.h) < EASILY_SEEN) {
      const node = item < 0 ? ~item : Math.max(0, tree.parent[item]);
      go({ node, from: 0 });
      if (!tree.bytesOf(item)) return onItem(item);
      if (!cells.some((cell) => cell.item === item)) go({ node, from: tree.itemsIn(node).indexOf(item) });
    }
    const { element } = cellOfItem.get(item);
    focusOn(cellAt(element), item);
    root.scrollIntoView({ block: "nearest" });
    byId("details").scrollIntoView({ block: "nearest" });
  }

  const cellAt = (target) => cells.find((cell) => cell.element === target.closest("button.cell"));

  root.addEventListener("click", (event) => {
    const cell = cellAt(event.target);
    if (cell) choose(cell, event.detail ? event.target.closest(".cell") : cell.element); // a key presses the whole cell
  });
  root.addEventListener("keydown", (event) => {
    const cell = cellAt(event.target);
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (Object.hasOwn(move, event.key) && cell) {
      const next = neighbour(cell, ...move[event.key]);
      if (next) focusOn(next);
    } else if (event.key === "Escape" || event.key === "Backspace") goOut();
    else if (event.key === "Home") go({ node: 0, from: 0 }, tree.itemsIn(0)[0]);
    else return;
    event.preventDefault();
  });

  root.addEventListener("pointerleave", () => showTip(null));
  root.addEventListener("pointermove", (event) => {
    const item = itemOfElement.get(event.target.closest(".cell"));
    if (item === undefined || event.pointerType === "touch") return showTip(null);
    const share = formatShare(tree.bytesOf(item), tree.bytesOf(0));
    showTip(new DOMRect(event.clientX, event.clientY, 0, 18), tree.nameOf(tree.nodeOf(item)), `${factsOf(item)} · ${share}`);
  });

  let width = 0;
  new ResizeObserver(() => {
    if (root.clientWidth === width) return;
    width = root.clientWidth;
    const focused = cells.find((cell) => cell.element === document.activeElement);
    draw();
    if (focused && focused.item !== null) cells.find((cell) => cell.item === focused.item)?.element.focus();
  }).observe(root);

  function paintBy(what) {
    column = what;
    draw();
    drawLegend();
  }

  return { go, reveal, paintBy };
}

const pen = document.createElement("canvas").getContext("2d"); // measures labels in their font

/** Names of which each has its own room, as texts: a word that one of them shortens has that many letters in all. */
function shortenedAlike(labels) {
  const texts = labels.map(({ name, width, lines }) => shortened(name, width, lines));
  if (labels.every(({ name }, number) => texts[number] === name)) return texts;
  const most = new Map();
  labels.forEach(({ name }, number) => {
    const words = name.split(".");
    for (const [at, kept] of texts[number].split(".").slice(0, -1).entries()) {
      most.set(words[at], Math.min(most.get(words[at]) ?? Infinity, [...kept].length));
    }
  });
  return labels.map(({ name, width, lines }) => {
    const words = withoutWeight(name).split(".");
    const last = words.pop();
    const kept = words.map((word) => [...word].slice(0, most.get(word)).join(""));
    return shortened([...kept, last].join("."), width, lines);
  });
}

const withoutWeight = (name) => name.replace(/(.)\.weight$/, "$1");

/**
 * A name in lines of so many pixels. ".weight" goes first; then parts from the left become their beginnings, which
 * still tell "attention.output.dense" from "output.dense": "a.output.dense".
 */
function shortened(name, width, lines = 1) {
  if (fits(name, width, lines)) return name;
  const parts = withoutWeight(name).split(".");
  for (const length of [4, 3, 1]) {
    for (let number = 0; number < parts.length; number += 1) {
      if (fits(parts.join("."), width, lines)) return parts.join(".");
      if (number < parts.length - 1) parts[number] = [...parts[number]].slice(0, length).join("");
    }
  }
  const last = parts.pop();
  for (const length of [4, 3]) if (fits([...parts, last.slice(0, length)].join("."), width, lines)) return [...parts, last.slice(0, length)].join(".");
  return [...parts, last].join(".").slice(0, Math.floor((width * lines) / CHARACTER) + 1); // the style puts an ellipsis where it still is too long
}

/** Whether a name fits into lines that are broken where nameText breaks them. */
function fits(name, width, lines) {
  if (name.length > (width * lines) / NARROWEST_CHARACTER) return false;
  let line = "";
  let used = 1;
  for (const piece of lines > 1 ? name.split(/(?<=[._/-])(?=[^\d\s])/) : [name]) {
    if (line && pen.measureText(line + piece).width > width) {
      used += 1;
      line = "";
    }
    line += piece;
    if (pen.measureText(line).width > width) return false;
  }
  return used <= lines;
}

const shapeText = (shape) => shape.join(" × ") || "scalar";
