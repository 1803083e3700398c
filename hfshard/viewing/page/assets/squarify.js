// Squarified treemaps (Bruls, Huizing, van Wijk 2000): rows of rectangles of sides as alike as they can be, but wider
// than high, so that names fit. What is all of one size, as the layers of a model, stands in rows that are read as text is.

const WIDER = 1.7; // the width of a good rectangle, by its height

/**
 * Divide a box among sizes.
 *
 * @param sizes Positive, the largest first.
 * @param box What is divided: {x, y, w, h} in pixels.
 * @param most How many rectangles there may be.
 * @param smallest The least area that is worth a rectangle, in square pixels.
 * @returns {boxes, rest}: a box for each of the first sizes, and what is left for all others, or null.
 */
function squarify(sizes, box, most, smallest) {
  const narrowed = { x: 0, y: 0, w: box.w / WIDER, h: box.h };
  const widened = ({ x, y, w, h }) => ({ x: box.x + WIDER * x, y: box.y + y, w: WIDER * w, h });
  const { boxes, rest } = squares(sizes, narrowed, most, smallest / WIDER);
  return { boxes: boxes.map(widened), rest: rest && widened(rest) };
}

function squares(sizes, box, most, smallest) {
  let { x, y, w, h } = box;
  const scale = (w * h) / sizes.reduce((sum, size) => sum + size, 0);
  const isAlike = sizes.length > 1 && sizes[0] === sizes[sizes.length - 1];
  if (isAlike && sizes.length <= most && sizes[0] * scale >= smallest) return { boxes: inRows(sizes.length, box), rest: null };
  const boxes = [];
  while (boxes.length < sizes.length) {
    const first = boxes.length;
    if (first >= most || sizes[first] * scale < smallest) return { boxes, rest: { x, y, w, h } };
    const side = Math.min(w, h);
    let area = sizes[first] * scale;
    let next = first + 1;
    while (next < Math.min(sizes.length, most)) {
      const more = sizes[next] * scale;
      if (worst(area + more, sizes[first] * scale, more, side) > worst(area, sizes[first] * scale, sizes[next - 1] * scale, side)) break;
      area += more;
      next += 1;
    }
    const thick = area / side;
    let at = 0;
    for (let number = first; number < next; number += 1) {
      const long = (sizes[number] * scale) / thick;
      boxes.push(w >= h ? { x, y: y + at, w: thick, h: long } : { x: x + at, y, w: long, h: thick });
      at += long;
    }
    if (w >= h) [x, w] = [x + thick, Math.max(0, w - thick)];
    else [y, h] = [y + thick, Math.max(0, h - thick)];
  }
  return { boxes, rest: null };
}

/** Divide a box among so many equals: from left to right, and row by row. */
function inRows(count, { x, y, w, h }) {
  const best = Math.min(count, Math.max(1, Math.round(Math.sqrt((count * h) / w))));
  const rows = [best, best - 1, best + 1].find((number) => number > 1 && count % number === 0) ?? best;
  const boxes = [];
  let top = y;
  for (let row = 0; row < rows; row += 1) {
    const columns = Math.floor(count / rows) + (row < count % rows ? 1 : 0);
    const high = (h * columns) / count;
    for (let column = 0; column < columns; column += 1) {
      boxes.push({ x: x + (w * column) / columns, y: top, w: w / columns, h: high });
    }
    top += high;
  }
  return boxes;
}

/** The ratio of the sides of the least square rectangle in a row. */
function worst(area, largest, least, side) {
  return Math.max((side * side * largest) / (area * area), (area * area) / (side * side * least));
}
