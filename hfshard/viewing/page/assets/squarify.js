// Squarified treemaps (Bruls, Huizing, van Wijk 2000): rows of rectangles that are as square as they can be.

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
  let { x, y, w, h } = box;
  const scale = (w * h) / sizes.reduce((sum, size) => sum + size, 0);
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

/** The ratio of the sides of the least square rectangle in a row. */
function worst(area, largest, least, side) {
  return Math.max((side * side * largest) / (area * area), (area * area) / (side * side * least));
}
