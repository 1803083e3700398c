// The panel below the map: all about the module or tensor that was chosen.

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
  const list = make("dl", "", ...facts.map(([label, value]) => make("div", "", make("dt", "", label), make("dd", "name", ...nameText(value)))));
  const panel = byId("details");
  panel.replaceChildren(make("strong", "name", ...nameText(node ? tree.nameOf(node) : "The whole checkpoint")), list);
  for (const part of detailParts) part(tree, item, panel);
}
