// The case table: sorted by any column, filtered by name, fold and value.
const MAX_ROWS = 200;
const table = { sort: "case", down: false, all: false };
const hasPatients = DATA.cases.some((one) => one.patient !== one.name);
const hasFolds = new Set(DATA.cases.map((one) => one.fold)).size > 1;
const pictureOf = new Map(DATA.pictures.map((picture, number) => [picture.case, number]));
const manyMethods = DATA.methods.length > 1;

// The columns: one score of all methods, or all scores of one method.
function caseColumns() {
  const view = byId("case-view").value;
  const columns = [{ key: "case", title: "case", get: (one) => one.name }];
  if (hasPatients) columns.push({ key: "patient", title: "patient", get: (one) => one.patient });
  if (hasFolds) columns.push({ key: "fold", title: "fold", get: (one) => one.fold, plain: true });
  if (view === "score") {
    const score = DATA.scores[state.score];
    DATA.methods.forEach((method, number) => {
      columns.push({ key: `m${number}`, title: method.name, get: (one) => one.values[state.score][number], score });
    });
    if (manyMethods) {
      columns.push({ key: "spread", title: "highest minus lowest", get: (one) => spread(one.values[state.score]), score, derived: true });
    }
  } else {
    const method = Number(view);
    DATA.scores.forEach((score, number) => {
      columns.push({ key: `s${number}`, title: score.heading, get: (one) => one.values[number][method], score });
    });
  }
  return columns;
}

function spread(values) {
  const known = values.filter((value) => value !== null);
  return known.length < 2 ? null : Math.max(...known) - Math.min(...known);
}

function compare(a, b) {
  if (typeof a === "string") return a.localeCompare(b, "en", { numeric: true });
  return a - b;
}

function filteredCases(columns) {
  const text = byId("filter-text").value.trim().toLowerCase();
  const fold = byId("filter-fold")?.value ?? "";
  const bound = (id, otherwise) => (byId(id).value === "" ? otherwise : Number(byId(id).value));
  const [from, to] = [bound("filter-from", -Infinity), bound("filter-to", Infinity)];
  const bounded = from !== -Infinity || to !== Infinity;
  const scored = columns.filter((column) => column.score && !column.derived);
  return DATA.cases.map((one, index) => ({ one, index })).filter(({ one }) => {
    if (text && !one.name.toLowerCase().includes(text) && !one.patient.toLowerCase().includes(text)) return false;
    if (fold !== "" && one.fold !== Number(fold)) return false;
    return !bounded || scored.some((column) => {
      const value = column.get(one);
      return value !== null && value * column.score.scale >= from && value * column.score.scale <= to;
    });
  });
}

function sortedCases(rows, columns) {
  const column = columns.find((candidate) => candidate.key === table.sort) ?? columns[0];
  const direction = table.down ? -1 : 1;
  // a case without a value comes last in both directions
  return rows.sort((a, b) => {
    const [first, second] = [column.get(a.one), column.get(b.one)];
    if (first === null || second === null) return (first === null) - (second === null);
    return direction * compare(first, second) || compare(a.one.name, b.one.name);
  });
}

function drawCases() {
  const columns = caseColumns();
  if (!columns.some((column) => column.key === table.sort)) table.sort = "case";
  const rows = sortedCases(filteredCases(columns), columns);
  const shown = table.all ? rows : rows.slice(0, MAX_ROWS);
  byId("case-table").tHead.replaceChildren(el("tr", {}, ...columns.map(headCell)));
  byId("case-table").tBodies[0].replaceChildren(...shown.map((row) => caseRow(row, columns)));
  byId("case-count").textContent = `${rows.length} of ${DATA.cases.length} cases`;
  const button = byId("show-all");
  button.hidden = shown.length === rows.length;
  button.textContent = `Show all ${rows.length} rows`;
}

function headCell(column) {
  const sorted = table.sort === column.key;
  const arrow = sorted ? (table.down ? " ▼" : " ▲") : "";
  const sort = () => {
    table.down = sorted ? !table.down : false;
    table.sort = column.key;
    drawCases();
    byId("case-table").querySelector(`[data-key="${column.key}"]`).focus();
  };
  return el(
    "th",
    { scope: "col", class: column.score || column.plain ? "number" : "", "aria-sort": sorted ? (table.down ? "descending" : "ascending") : "none" },
    el("button", { type: "button", class: "sort", "data-key": column.key, onclick: sort }, ...breakable(column.title), el("span", { "aria-hidden": "true" }, arrow)),
  );
}

function caseRow({ one, index }, columns) {
  const best = bestValue(one, columns);
  return el("tr", {}, ...columns.map((column) => {
    const value = column.get(one);
    if (column.key === "case") {
      const name = pictureOf.has(index)
        ? el("button", { type: "button", class: "link", title: "See its images", onclick: () => openCase(index) }, value)
        : value;
      return el("th", { scope: "row" }, name);
    }
    if (!column.score) return el("td", { class: column.plain ? "number" : "" }, String(value));
    return el("td", { class: value !== null && !column.derived && value === best ? "number leads" : "number" }, scoreText(value, column.score));
  }));
}

// The best value of a row that compares methods; undefined if all are equal.
function bestValue(one, columns) {
  const scored = columns.filter((column) => column.score && !column.derived);
  if (byId("case-view").value !== "score" || !manyMethods || !spread(one.values[state.score])) return undefined;
  const values = scored.map((column) => column.get(one)).filter((value) => value !== null);
  return DATA.scores[state.score].higher_is_better ? Math.max(...values) : Math.min(...values);
}

// In the file a column of a method also names the score, which the page shows above the table.
function columnTitle(column) {
  return column.score && column.title !== column.score.heading ? `${column.title}: ${column.score.heading}` : column.title;
}

// As shown, in percent where the page has percent, but with all digits; times 100 may add a wrong last one.
function savedValue(column, one) {
  const value = column.get(one);
  if (value === null) return "NaN";
  return column.score ? Number((value * column.score.scale).toPrecision(15)) : value;
}

function saveCsv() {
  const columns = caseColumns();
  const quote = (value) => (/[",\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  const lines = [columns.map((column) => quote(columnTitle(column))).join(",")];
  for (const { one } of sortedCases(filteredCases(columns), columns)) {
    lines.push(columns.map((column) => quote(savedValue(column, one))).join(","));
  }
  const url = URL.createObjectURL(new Blob([`${lines.join("\n")}\n`], { type: "text/csv" }));
  el("a", { href: url, download: "cases.csv" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function startCases() {
  const view = byId("case-view");
  view.append(
    el("option", { value: "score" }, manyMethods ? "one score of all methods" : "one score"),
    ...DATA.methods.map((method, number) => el("option", { value: number }, `all scores of ${method.name}`)),
  );
  if (!manyMethods) view.value = "0";
  const score = el("label", { class: "field" }, "Score", el("select", { class: "score-select" }, ...DATA.scores.map((one, number) => el("option", { value: number }, one.heading))));
  view.parentElement.after(score);
  const follow = () => {
    score.hidden = view.value !== "score";
    drawCases();
  };
  view.addEventListener("change", follow);
  const form = byId("case-filter");
  form.addEventListener("input", (event) => {
    if (event.target !== view && !event.target.classList.contains("score-select")) drawCases();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => {
    // only the filters, not the choice of columns
    event.preventDefault();
    for (const id of ["filter-text", "filter-fold", "filter-from", "filter-to"]) if (byId(id)) byId(id).value = "";
    drawCases();
  });
  byId("save-csv").addEventListener("click", saveCsv);
  byId("show-all").addEventListener("click", () => {
    table.all = true;
    drawCases();
  });
  state.listeners.push(drawCases);
  follow();
}
