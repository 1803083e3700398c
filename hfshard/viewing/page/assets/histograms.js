// What the numbers of a tensor are like, in the panel beside the map, where the page was made with --values.

const HEIGHTS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

function drawHistogram(heights, low, high, most) {
  const svgOf = (tag) => document.createElementNS("http://www.w3.org/2000/svg", tag);
  const svg = svgOf("svg");
  svg.setAttribute("class", "histogram");
  svg.setAttribute("viewBox", `0 0 ${heights.length} 61`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `Histogram from ${low} to ${high}, at most ${formatCount(most)} in one of ${heights.length} bins`);
  [...heights].forEach((digit, number) => {
    const bar = svgOf("rect");
    const height = HEIGHTS.indexOf(digit);
    for (const [name, value] of Object.entries({ x: number, width: 0.9, y: 61 - height, height })) bar.setAttribute(name, value);
    svg.append(bar);
  });
  const scale = make("div", "histogram-scale", make("span", "", String(low)), make("span", "", `most in a bin: ${formatCount(most)}`), make("span", "", String(high)));
  return make("div", "histogram-box", svg, scale);
}

if (data.values) {
  const rowOfNode = new Map(data.values.rows.map((row) => [row[0], row]));
  detailParts.push((tree, item, panel) => {
    if (!tree.isLeaf(item) || !tree.isTensor(tree.nodeOf(item))) return;
    const row = rowOfNode.get(tree.nodeOf(item));
    if (!row) {
      const words = "The numbers of this tensor were not read: it is not among the largest, or has fewer than 8 bits each.";
      panel.append(make("p", "quiet", words));
      return;
    }
    const [, elements, nan, inf, least, greatest, mean, std, low, high, heights, most, zeros, norm, deadRows] = row;
    const facts = [["least", least], ["greatest", greatest], ["mean", mean], ["standard deviation", std], ["norm", norm]];
    const shownFacts = facts.map(([label, value]) => [label, value === null ? "none" : String(value)]);
    shownFacts.push(["zeros", formatShare(zeros, elements)]);
    for (const [label, count] of [["rows of zeros", deadRows], ["NaN", nan], ["inf", inf]]) if (count) shownFacts.push([label, formatCount(count)]);
    if (heights) panel.append(drawHistogram(heights, low, high, most));
    panel.append(make("dl", "", ...shownFacts.map(([label, value]) => make("div", "", make("dt", "", label), make("dd", "", value)))));
  });
}
