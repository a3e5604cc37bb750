// Volume with its interval: one case after the other, sorted by the expected volume.
const volumes = { at: null };

function chosenVolumes() {
  const method = Number(byId("volume-method").value);
  const ofMethod = DATA.volumes.filter((one) => one.method === method);
  const name = byId("volume-class")?.value ?? ofMethod[0].class_name;
  return ofMethod.find((one) => one.class_name === name) ?? null;
}

// three digits, as volumes differ by orders of magnitude
const volumeText = (value) => (value === null ? "–" : String(Number(value.toPrecision(3))));
const rangeText = (low, high) => (low === null ? "–" : `${volumeText(low)} to ${volumeText(high)}`);
const methodName = (one) => DATA.methods[one.method].name;

function shownEnds(one, at) {
  const kind = one.is_corrected ? "conformal_" : "";
  return [one[`${kind}low`][at], one[`${kind}high`][at]];
}

function isCovered(one, at, value) {
  const [low, high] = shownEnds(one, at);
  return low !== null && value >= low && value <= high;
}

function caseWords(one, at) {
  const raters = one.raters[at].map((value, number) => (value === null ? "" : `${one.rater_names[number]} ${volumeText(value)}${isCovered(one, at, value) ? "" : " (not covered)"}`)).filter((text) => text);
  const corrected = one.is_corrected ? `, corrected ${rangeText(one.conformal_low[at], one.conformal_high[at])}` : "";
  return `${one.names[at]}: expected ${volumeText(one.expected[at])} ${one.unit}, nested ${rangeText(one.low[at], one.high[at])}${corrected}; raters ${raters.join(", ") || "–"}`;
}

function volumeLegend(one) {
  const key = (...parts) => svg("svg", { class: "key-line", width: 22, height: 18, viewBox: "0 0 22 18", "aria-hidden": "true" }, ...parts);
  const cross = `M-3 -3L3 3M3 -3L-3 3`;
  const entries = [
    [key(svg("line", { x1: 11, x2: 11, y1: 1, y2: 17, class: "nested", "stroke-width": 7 })), "nested interval"],
    ...(one.is_corrected ? [[key(svg("path", { d: "M7 1h8M11 1v16M7 17h8", class: "conformal" })), "corrected interval"]] : []),
    [key(svg("line", { x1: 4, x2: 18, y1: 9, y2: 9, class: "expected" })), "expected volume"],
    [key(svg("circle", { cx: 11, cy: 9, r: 2.6, class: "covered" })), "rater, covered"],
    [key(svg("path", { d: cross, transform: "translate(11 9)", class: "missed" })), "rater, not covered"],
  ];
  return el("ul", { class: "legend" }, ...entries.map(([mark, text]) => el("li", {}, mark, text)));
}

function drawVolumes(width) {
  const one = chosenVolumes();
  volumes.at = null;
  if (one === null) return [el("p", {}, "This method has no volumes of this class.")];
  const count = one.names.length;
  const [left, top, height] = [58, 22, 340];
  const step = Math.min(40, Math.max(7, (width - left - 16) / count));
  const full = Math.ceil(left + count * step + 12);
  const bottom = height - 40;
  const all = [...one.expected, ...one.high, ...one.conformal_high, ...one.raters.flat()].filter((value) => value !== null);
  const highest = Math.max(...all) * 1.03 || 1;
  const bend = byId("volume-root").checked ? Math.sqrt : (value) => value;
  const scaled = linear(0, bend(highest), bottom, top);
  const y = (value) => scaled(bend(value));
  const x = (at) => left + (at + 0.5) * step;
  const label = `Volume of ${one.class_name} of ${count} cases by ${methodName(one)}, sorted: expected from ${volumeText(one.expected[0])} to ${volumeText(one.expected.at(-1))} ${one.unit}. The ${one.is_corrected ? "corrected" : "nested"} intervals, nominal ${one.level}, cover ${one.coverage === null ? "–" : fixed(100 * one.coverage)} % of the raters`;
  const root = svg("svg", { width: full, height, viewBox: `0 0 ${full} ${height}`, role: "img", "aria-label": label, class: "wide" });
  const marker = svg("rect", { y: top - 6, height: bottom - top + 6, width: step, class: "chosen-case", visibility: "hidden" });
  root.append(
    marker,
    axisY(ticks(0, highest, 6).filter((mark, at, marks) => at === 0 || Math.abs(y(mark.value) - y(marks[at - 1].value)) > 8), y, left, full - 8),
    svg("text", { x: 4, y: 12, class: "axis-title" }, `volume of ${shortened(one.class_name, 30)} (${one.unit})`),
    svg("text", { x: Math.min(left + (count * step) / 2, width / 2), y: bottom + 24, "text-anchor": "middle", class: "axis-title" }, `${count} cases by expected volume`),
  );
  for (let at = 0; at < count; at += 1) root.append(...caseMarks(one, at, x(at), y, step));
  const tip = el("p", { class: "tip", role: "status" }, " ");
  const box = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Volumes, one case after the other" }, root);
  followScroll(box);
  const choose = (at) => {
    volumes.at = at;
    marker.setAttribute("visibility", at === null ? "hidden" : "visible");
    if (at !== null) marker.setAttribute("x", x(at) - step / 2);
    tip.textContent = at === null ? " " : caseWords(one, at);
  };
  const open = () => {
    if (volumes.at !== null && one.cases[volumes.at] !== null) openCase(one.cases[volumes.at]);
  };
  root.addEventListener("pointermove", (event) => {
    const at = Math.floor((event.clientX - root.getBoundingClientRect().left - left) / step);
    choose(at >= 0 && at < count ? at : null);
  });
  root.addEventListener("click", open);
  box.addEventListener("keydown", (event) => {
    const from = volumes.at ?? -1;
    const to = { ArrowRight: from + 1, ArrowLeft: from - 1, Home: 0, End: count - 1 }[event.key];
    if (event.key === "Enter") open();
    if (to === undefined) return;
    event.preventDefault();
    choose(Math.min(count - 1, Math.max(0, to)));
    box.scrollLeft = x(volumes.at) - box.clientWidth / 2;
  });
  if (byId("volume-details").open) drawVolumeTable();
  return [volumeLegend(one), box, tip];
}

function caseMarks(one, at, x, y, step) {
  const marks = [];
  const half = Math.min(5, step * 0.4);
  if (one.low[at] !== null) {
    marks.push(svg("line", { x1: x, x2: x, y1: y(one.low[at]), y2: y(one.high[at]), class: "nested", "stroke-width": Math.min(9, step * 0.7) }));
  }
  if (one.conformal_low[at] !== null) {
    const [low, high] = [y(one.conformal_low[at]), y(one.conformal_high[at])];
    marks.push(svg("path", { d: `M${x - half} ${high}h${2 * half}M${x} ${high}V${low}M${x - half} ${low}h${2 * half}`, class: "conformal" }));
  }
  marks.push(svg("line", { x1: x - half - 1, x2: x + half + 1, y1: y(one.expected[at]), y2: y(one.expected[at]), class: "expected" }));
  for (const value of one.raters[at]) {
    if (value === null) continue;
    marks.push(isCovered(one, at, value)
      ? svg("circle", { cx: x, cy: y(value), r: 2.4, class: "covered" })
      : svg("path", { d: "M-3 -3L3 3M3 -3L-3 3", transform: `translate(${x} ${y(value)})`, class: "missed" }));
  }
  return marks;
}

// The same numbers as the chart, for the keyboard and for screen readers.
function drawVolumeTable() {
  const one = chosenVolumes();
  if (one === null) return;
  const head = ["case", `expected (${one.unit})`, "nested interval", ...(one.is_corrected ? ["corrected interval"] : []), ...one.rater_names];
  byId("volume-table").tHead.replaceChildren(el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name))));
  byId("volume-table").tBodies[0].replaceChildren(...one.names.map((name, at) => {
    const cells = [volumeText(one.expected[at]), rangeText(one.low[at], one.high[at]), ...(one.is_corrected ? [rangeText(one.conformal_low[at], one.conformal_high[at])] : [])];
    const raters = one.raters[at].map((value) => (value === null || isCovered(one, at, value) ? volumeText(value) : `${volumeText(value)} ✕`));
    const shown = pictureOf.has(one.cases[at])
      ? el("button", { type: "button", class: "link", title: "See its images", onclick: () => openCase(one.cases[at]) }, name)
      : name;
    return el("tr", {}, el("th", { scope: "row" }, shown), ...[...cells, ...raters].map((text) => el("td", { class: "number" }, text)));
  }));
}

function startVolumes(redraw) {
  if (!byId("volume-method")) return;
  for (const id of ["volume-method", "volume-class", "volume-root"]) byId(id)?.addEventListener("change", redraw);
  byId("volume-details").addEventListener("toggle", drawVolumeTable);
}
