// What every page has: its data, elements made of text alone, figures for people, and the switch of dark and light.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

/** Make an element. Text goes in as text: nothing that a checkpoint contains is ever parsed as HTML. */
function make(tag, classes, ...children) {
  const element = document.createElement(tag);
  element.className = classes;
  element.append(...children);
  return element;
}

/** A name as text that may be broken after a dot, a slash or a line below, not in a word or a number. */
function nameText(name) {
  const parts = name.length > 300 ? [name] : name.split(/(?<=[._/-])(?=[^\d\s])/);
  return parts.flatMap((part, number) => (number ? [document.createElement("wbr"), part] : [part]));
}

/** Three significant digits or so, in powers of 1000, as hfshard prints sizes. */
function formatSize(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  let power = 1;
  while (bytes / 1000 ** power >= 999.95 && power < 5) power += 1;
  return `${(bytes / 1000 ** power).toFixed(1)} ${"KMGTP"[power - 1]}B`;
}

const formatCount = (number) => number.toLocaleString("en-US");
const countOf = (number, noun) => `${formatCount(number)} ${noun}${number === 1 ? "" : "s"}`;

function formatShare(part, whole) {
  const percent = whole ? (100 * part) / whole : 0;
  return percent > 0 && percent < 0.1 ? "under 0.1 %" : `${percent.toFixed(1)} %`;
}

const tip = make("div", "");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);

/** Show a name and facts at a box of the window: above it, or below it where there is no room; without a box, nothing. */
function showTip(box, name, facts) {
  tip.hidden = !box;
  if (!box) return;
  tip.replaceChildren(make("span", "name", ...nameText(name)), facts);
  placeTip(box);
}

function placeTip(box) {
  const left = Math.min(box.left + (box.width - tip.offsetWidth) / 2, document.documentElement.clientWidth - tip.offsetWidth - 8);
  const top = box.top - tip.offsetHeight - 6;
  Object.assign(tip.style, { left: `${Math.max(8, left)}px`, top: `${top < 0 ? box.bottom + 6 : top}px` });
}

/** Tell users of a screen reader. */
function announce(text) {
  byId("announcer").textContent = text;
}

{
  const button = byId("theme");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (prefersDark.matches ? "dark" : "light")) === "dark";
  const label = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `${button.textContent} colours`);
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    label();
  });
  prefersDark.addEventListener("change", label);
  button.hidden = false;
  label();
}

// "/" leads to the search, where the page has one.
document.addEventListener("keydown", (event) => {
  const input = byId("search");
  if (event.key !== "/" || !input || event.target === input || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  input.focus();
});
