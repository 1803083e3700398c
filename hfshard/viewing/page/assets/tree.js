// The tree of modules: columns with an entry for each node, in the order in which a node comes before what is in it.
//
// An item is what a map shows: a node with all that is below it, or, as ~node, only the tensor of a node that has both.

/** The labels, of which each is written as how much it has in common with the one before, and the rest. */
function decodeLabels(coded) {
  const labels = [];
  let before = "";
  for (let at = 0; at < coded.length; at += 2) {
    before = before.slice(0, coded[at]) + coded[at + 1];
    labels.push(before);
  }
  return labels;
}

/** Add up the columns of the page's data. */
function makeTree({ labels: coded, label, depth, kind, file, kinds, dtypes, files, parts, ties }) {
  const labels = decodeLabels(coded);
  const count = label.length;
  const parent = new Int32Array(count).fill(-1);
  const end = new Int32Array(count); // the first node behind all that is in this one
  const bytes = new Float64Array(count);
  const parameters = new Float64Array(count);
  const tensors = new Int32Array(count);
  const names = new Array(count);
  const path = [];
  for (let node = 0; node < count; node += 1) {
    path[depth[node]] = node;
    if (node) parent[node] = path[depth[node] - 1];
    names[node] = depth[node] > 1 ? `${names[parent[node]]}.${labels[label[node]]}` : labels[label[node]];
    end[node] = node + 1;
    if (!kind[node]) continue;
    bytes[node] = kinds[kind[node] - 1][2];
    parameters[node] = kinds[kind[node] - 1][1].reduce((product, size) => product * size, 1);
    tensors[node] = 1;
  }
  const ownBytes = bytes.slice();
  const ownParameters = parameters.slice();
  for (let node = count - 1; node > 0; node -= 1) {
    const above = parent[node];
    end[above] = Math.max(end[above], end[node]);
    bytes[above] += bytes[node];
    parameters[above] += parameters[node];
    tensors[above] += tensors[node];
  }
  const storedAs = new Map(ties);
  const tiedTo = new Map();
  for (const [node, stored] of ties) {
    if (tiedTo.has(stored)) tiedTo.get(stored).push(node);
    else tiedTo.set(stored, [node]);
  }

  const nodeOf = (item) => (item < 0 ? ~item : item);
  const isLeaf = (item) => item < 0 || end[item] === item + 1;
  const bytesOf = (item) => (item < 0 ? ownBytes[~item] : bytes[item]);
  const labelOf = (node) => labels[label[node]] || (node ? "(no name)" : "all");
  // What a name has behind that of a module above it.
  const nameBelow = (node, above) => names[node].slice(above ? names[above].length + 1 : 0) || labelOf(node);
  const nameOf = (node) => names[node] || labelOf(node);
  const kindOf = (item) => kinds[kind[nodeOf(item)] - 1];

  const keyOf = { dtype: (node) => kinds[kind[node] - 1][0], file: (node) => file[node] - 1, part: (node) => kinds[kind[node] - 1][3] };

  /** What lies directly in a node and has bytes, the largest first; equals in natural order. */
  function itemsIn(node) {
    const items = kind[node] && ownBytes[node] ? [~node] : [];
    for (let below = node + 1; below < end[node]; below = end[below]) if (bytes[below]) items.push(below);
    return items.sort((one, other) => bytesOf(other) - bytesOf(one));
  }

  /** Bytes of an item by dtype, file or part of the model: a Map of numbers. */
  function sharesOf(item, column) {
    const shares = new Map();
    const first = nodeOf(item);
    for (let node = first; node < (item < 0 ? first + 1 : end[first]); node += 1) {
      if (!kind[node]) continue;
      const key = keyOf[column](node);
      shares.set(key, (shares.get(key) ?? 0) + ownBytes[node]);
    }
    return shares;
  }

  return {
    count, parent, names, dtypes, files, storedAs, tiedTo, colours: { dtype: dtypes, file: files, part: parts },
    nodeOf, isLeaf, bytesOf, labelOf, nameOf, nameBelow, kindOf, itemsIn, sharesOf,
    isTensor: (node) => kind[node] > 0,
    fileOf: (item) => files[file[nodeOf(item)] - 1],
    parametersOf: (item) => (item < 0 ? ownParameters[~item] : parameters[item]),
    tensorsOf: (item) => (item < 0 ? 1 : tensors[item]),
  };
}
