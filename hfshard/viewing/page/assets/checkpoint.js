// The page of one checkpoint: map, panel and search in their places.

const tree = makeTree(data);
const treemap = makeTreemap(tree, (item) => showDetails(tree, item));

/** Lead to a tensor, or, of a tied name, to the tensor that is stored. */
function revealNode(node) {
  const stored = tree.storedAs.get(node) ?? node;
  treemap.reveal(tree.isLeaf(stored) ? stored : ~stored);
}

function paintBy(column) {
  for (const button of document.querySelectorAll("[data-colour]")) button.setAttribute("aria-pressed", String(button.dataset.colour === column));
  treemap.paintBy(column);
}

makeSearch(tree, revealNode);
for (const element of document.querySelectorAll(tree.dtypes.length > 1 || tree.files.length > 1 ? ".search, .colours" : ".search")) element.hidden = false;
for (const button of document.querySelectorAll("[data-colour]")) {
  button.addEventListener("click", () => paintBy(button.dataset.colour));
}
for (const place of document.querySelectorAll("[data-node]")) {
  const link = make("button", "link", ...nameText(place.textContent));
  link.addEventListener("click", () => revealNode(Number(place.dataset.node)));
  place.replaceChildren(link);
}
paintBy(tree.dtypes.length > 1 ? "dtype" : "file"); // one colour says nothing
treemap.go({ node: 0, from: 0 });
