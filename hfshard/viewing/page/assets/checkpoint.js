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
document.querySelector(".search").hidden = false;
const columns = Object.keys(tree.colours).filter((column) => tree.sharesOf(0, column).size > 1); // one colour says nothing
document.querySelector(".colours").hidden = columns.length < 2;
for (const button of document.querySelectorAll("[data-colour]")) {
  if (columns.includes(button.dataset.colour)) button.addEventListener("click", () => paintBy(button.dataset.colour));
  else button.remove();
}
for (const place of document.querySelectorAll("[data-node]")) {
  const link = make("button", "link", ...nameText(place.textContent));
  link.addEventListener("click", () => revealNode(Number(place.dataset.node)));
  place.replaceChildren(link);
}
paintBy(columns[0] ?? "dtype");
treemap.go({ node: 0, from: 0 });
