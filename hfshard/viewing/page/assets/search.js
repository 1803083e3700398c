// Search by name: every word must occur. 100,000 names are looked through in some milliseconds.

const MOST_RESULTS = 50; // shown; all are counted

function makeSearch(tree, onNode) {
  const input = byId("search");
  const list = byId("results");
  let lower = null; // names in lower case, made when they are first needed
  let found = [];
  let active = -1;

  function find(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    lower ??= tree.names.map((name) => name.toLowerCase());
    found = [];
    if (!words.length) return;
    for (let node = 1; node < tree.count; node += 1) {
      const isThere = tree.isTensor(node) || tree.storedAs.has(node);
      if (isThere && words.every((word) => lower[node].includes(word))) found.push(node);
    }
  }

  function option(node, number) {
    const item = tree.isLeaf(node) ? node : ~node;
    const size = tree.storedAs.has(node) ? "tied" : formatSize(tree.bytesOf(item));
    const element = make("div", "", make("span", "name", ...nameText(tree.nameOf(node))), make("span", "", size));
    element.id = `result-${number}`;
    element.setAttribute("role", "option");
    element.addEventListener("mousedown", (event) => event.preventDefault());
    element.addEventListener("click", () => pick(node));
    return element;
  }

  function draw() {
    const bytes = found.reduce((sum, node) => sum + (tree.storedAs.has(node) ? 0 : tree.bytesOf(tree.isLeaf(node) ? node : ~node)), 0);
    const summary = found.length ? `${countOf(found.length, "name")}, ${formatSize(bytes)}` : "No such name";
    const more = found.length > MOST_RESULTS ? `, the first ${MOST_RESULTS} below` : "";
    const head = make("div", "quiet", summary + more);
    head.setAttribute("role", "presentation");
    list.replaceChildren(head, ...found.slice(0, MOST_RESULTS).map(option));
    active = -1;
    mark();
    open(input.value.trim() !== "");
    if (input.value.trim()) announce(summary);
  }

  function open(isOpen) {
    list.hidden = !isOpen;
    input.setAttribute("aria-expanded", String(isOpen));
  }

  function mark() {
    const options = [...list.querySelectorAll("[role=option]")];
    options.forEach((element, number) => element.setAttribute("aria-selected", String(number === active)));
    if (active < 0) input.removeAttribute("aria-activedescendant");
    else {
      input.setAttribute("aria-activedescendant", `result-${active}`);
      options[active].scrollIntoView({ block: "nearest" });
    }
  }

  function pick(node) {
    open(false);
    onNode(node);
  }

  input.addEventListener("input", () => {
    find(input.value);
    draw();
  });
  input.addEventListener("focus", () => { if (input.value.trim()) open(true); });
  input.addEventListener("blur", () => open(false));
  input.addEventListener("keydown", (event) => {
    const shown = Math.min(found.length, MOST_RESULTS);
    if (event.key === "ArrowDown" && shown) active = (active + 1) % shown;
    else if (event.key === "ArrowUp" && shown) active = (active + shown - (active < 0 ? 0 : 1)) % shown;
    else if (event.key === "Enter" && shown) pick(found[Math.max(active, 0)]);
    else if (event.key === "Escape" && !list.hidden) open(false);
    else return;
    event.preventDefault();
    if (event.key.startsWith("Arrow")) {
      open(true);
      mark();
    }
  });
}
