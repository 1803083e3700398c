// The page of one checkpoint: map, panel and search in their places.

const tree = makeTree(data);
const treemap = makeTreemap(tree, (item) => showDetails(tree, item));

/** Lead to a tensor, or, of a tied name, to the tensor that is stored. */
function revealNode(node) {
  const stored = tree.storedAs.get(node) ?? node;
  treemap.reveal(tree.isLeaf(stored) ? stored : ~stored);
}

makeSearch(tree, revealNode);
for (const element of document.querySelectorAll(".search, .colours")) element.hidden = false;
for (const button of document.querySelectorAll("[data-colour]")) {
  button.addEventListener("click", () => {
    for (const other of document.querySelectorAll("[data-colour]")) other.setAttribute("aria-pressed", String(other === button));
    treemap.paintBy(button.dataset.colour);
  });
}
for (const place of document.querySelectorAll("[data-node]")) {
  const link = make("button", "link", ...nameText(place.textContent));
  link.addEventListener("click", () => revealNode(Number(place.dataset.node)));
  place.replaceChildren(link);
}
treemap.paintBy("dtype");
treemap.go({ node: 0, from: 0 });
