// Tables whose headers sort them, by mouse and by keyboard: every <table class="sortable">, and makeSortable for others.

const collator = new Intl.Collator("en", { numeric: true });
const NUMBER = /^[+-]?(\d[\d,]*)?\.?\d+(e[+-]?\d+)?( %)?$/i; // also 1,234 and 12.5 %
const INFINITY = /^([+-]?)inf(inity)?$/i;

/** The value that a cell sorts by: a number, or a text in lower case; null for nothing and for NaN. */
function sortValue(cell) {
  const text = (cell?.dataset.value ?? cell?.textContent ?? "").trim();
  if (NUMBER.test(text)) return Number(text.replace(/,| %$/g, ""));
  const infinity = INFINITY.exec(text);
  if (infinity) return infinity[1] === "-" ? -Infinity : Infinity;
  return !text || text.toLowerCase() === "nan" ? null : text.toLowerCase();
}

/** Order two values; null comes last in either direction, and numbers come before texts. */
function compareValues(one, other, isDescending) {
  if (one === null || other === null) return (one === null) - (other === null);
  const isNumber = typeof one === "number";
  const order =
    isNumber !== (typeof other === "number") ? (isNumber ? -1 : 1)
    : isNumber ? (one === other ? 0 : one < other ? -1 : 1)
    : collator.compare(one, other);
  return isDescending ? -order : order;
}

/** Sort a table's rows from the order of the page. A row with a cell over several columns belongs to the one above. */
function rowSorter(table) {
  const body = table.tBodies[0];
  const groups = [];
  for (const row of body.rows) {
    if (groups.length && row.querySelector(":scope > [colspan]")) groups.at(-1).push(row);
    else groups.push([row]);
  }
  return (column, isDescending) => {
    const keyed = groups.map((rows) => [sortValue(rows[0].cells[column]), rows]);
    keyed.sort(([one], [other]) => compareValues(one, other, isDescending));
    body.append(...keyed.flatMap(([, rows]) => rows));
  };
}

/**
 * Put a button into each header with a visible label. A header's first press sorts numbers (class "number") from the
 * largest and texts from the first, the next one the other way round; aria-sort says how the table is sorted, also if
 * the page says it from the beginning.
 */
function makeSortable(table, sort = rowSorter(table)) {
  table.classList.add("sortable");
  const heads = [...table.tHead.rows[0].cells];
  for (const head of heads) {
    if (!head.textContent.trim() || head.querySelector(".unseen")) continue;
    const label = make("span", "", ...head.childNodes);
    const button = make("button", "sort", label);
    button.type = "button";
    head.append(button);
    button.addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const isDescending = now ? now !== "descending" : head.classList.contains("number");
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", isDescending ? "descending" : "ascending");
      sort(head.cellIndex, isDescending);
      announce(`Sorted by ${label.textContent}, ${isDescending ? "descending" : "ascending"}`);
    });
  }
}

for (const table of document.querySelectorAll("table.sortable")) {
  if (table.tHead && table.tBodies[0]?.rows.length > 1) makeSortable(table);
}
