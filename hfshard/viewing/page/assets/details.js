// The panel beside the map: all about the module or tensor that was chosen.

const MOST_PARTS = 6; // the largest of a module that are listed

const detailParts = []; // functions of (tree, item, panel) that add to the panel, in this order

function showDetails(tree, item) {
  const node = tree.nodeOf(item);
  const stored = tree.storedAs.get(node);
  const facts = [];
  if (stored !== undefined) facts.push(["stored as", tree.nameOf(stored)]);
  else if (tree.isLeaf(item) && tree.isTensor(node)) {
    const [dtype, shape] = tree.kindOf(item);
    facts.push(["dtype", tree.dtypes[dtype]], ["shape", shapeText(shape)], ["file", tree.fileOf(item)]);
  } else facts.push(["tensors", formatCount(tree.tensorsOf(item))]);
  if (stored === undefined) {
    facts.push(["parameters", formatCount(tree.parametersOf(item))]);
    facts.push(["size", `${formatSize(tree.bytesOf(item))} · ${formatShare(tree.bytesOf(item), tree.bytesOf(0))}`]);
  }
  const tied = tree.tiedTo.get(node) ?? [];
  if (tied.length) {
    const more = tied.length > 3 ? ` and ${formatCount(tied.length - 3)} more` : "";
    facts.push(["tied", tied.slice(0, 3).map((other) => tree.nameOf(other)).join(", ") + more]);
  }
  const list = make("dl", "", ...facts.map(([label, value]) => make("div", value.length > 14 ? "long" : "", make("dt", "", label), make("dd", "name", ...nameText(value)))));
  const panel = byId("details");
  panel.replaceChildren(make("strong", "name", ...nameText(node ? tree.nameOf(node) : "The whole checkpoint")), list);
  if (!tree.isLeaf(item)) panel.append(largestParts(tree, item));
  for (const part of detailParts) part(tree, item, panel);
}

/** What a module consists of, by bytes. */
function largestParts(tree, item) {
  const parts = tree.itemsIn(item);
  const rows = parts.slice(0, MOST_PARTS).map((part) => [tree.nameBelow(tree.nodeOf(part), item), formatShare(tree.bytesOf(part), tree.bytesOf(item))]);
  if (parts.length > MOST_PARTS) {
    const rest = parts.slice(MOST_PARTS).reduce((sum, part) => sum + tree.bytesOf(part), 0);
    rows.push([`${formatCount(parts.length - MOST_PARTS)} more`, formatShare(rest, tree.bytesOf(item))]);
  }
  return make("dl", "parts", ...rows.map(([name, share]) => make("div", "", make("dt", "name", ...nameText(name)), make("dd", "", share))));
}
