// Charts in SVG, drawn for the available width and drawn again when it changes.
function ticks(low, high, most) {
  const span = high - low || 1;
  const rough = span / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((part) => part * power).find((candidate) => candidate >= rough);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const marks = [];
  for (let number = Math.ceil(low / step - 1e-9); number * step <= high + step * 1e-9; number += 1) {
    marks.push({ value: number * step, text: (number * step).toFixed(digits).replace("-", "−") });
  }
  return marks;
}

// The name; of a long one its start and its end, as names mostly differ at the end.
function shortened(name, most) {
  return name.length <= most ? name : `${name.slice(0, Math.floor(most / 2) - 1)}…${name.slice(-Math.floor(most / 2))}`;
}

const linear = (low, high, from, to) => (value) => from + ((value - low) / (high - low || 1)) * (to - from);

// A container whose drawing follows its width; the returned function draws it again.
function chart(id, draw) {
  const box = byId(id);
  if (!box) return () => {};
  let width = 0;
  const redraw = () => {
    if (width > 0) box.replaceChildren(...draw(width));
  };
  new ResizeObserver((entries) => {
    const now = Math.floor(entries[0].contentRect.width);
    if (now !== width) {
      width = now;
      redraw();
    }
  }).observe(box);
  return redraw;
}

function axisX(marks, x, top, bottom, title, middle) {
  const group = svg("g", { class: "axis" });
  for (const mark of marks) {
    const at = x(mark.value);
    group.append(
      svg("line", { x1: at, x2: at, y1: top, y2: bottom, class: "grid" }),
      svg("text", { x: at, y: bottom + 16, "text-anchor": "middle" }, mark.text),
    );
  }
  group.append(svg("text", { x: middle, y: bottom + 34, "text-anchor": "middle", class: "axis-title" }, title));
  return group;
}

function axisY(marks, y, left, right) {
  const group = svg("g", { class: "axis" });
  for (const mark of marks) {
    const at = y(mark.value);
    group.append(
      svg("line", { x1: left, x2: right, y1: at, y2: at, class: "grid" }),
      svg("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, mark.text),
    );
  }
  return group;
}

function line(points, style) {
  return svg("polyline", {
    points: points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" "),
    fill: "none", "stroke-width": 2, "stroke-dasharray": style.dashes.join(" "), ...ink(style),
  });
}

const legendOf = (entries) =>
  el("ul", { class: "legend" }, ...entries.map(({ style, text, marker }) => el("li", {}, lineKey(style, marker), text)));

// --- every case as a point ------------------------------------------------------------------------------

function drawDistributions(width) {
  const score = DATA.scores[state.score];
  const narrow = width < 560;
  const longest = Math.max(...DATA.methods.map((method) => method.name.length));
  const left = narrow ? 10 : 24 + 7.8 * Math.min(30, longest);
  const right = width - 14;
  const rowHeight = narrow ? 78 : 60;
  const bottom = 8 + rowHeight * DATA.methods.length;
  const values = DATA.cases.map((one) => one.values[state.score].map((v) => (v === null ? null : v * score.scale)));
  const raters = score.raters === null ? null : score.raters * score.scale;
  const all = [...values.flat(), raters].filter((v) => v !== null);
  const reach = Math.max(...all) - Math.min(...all) || 1;
  const low = Math.min(...all) - reach * 0.03;
  const high = Math.max(...all) + reach * 0.03;
  const x = linear(low, high, left, right);
  const centre = (method) => 8 + rowHeight * (method + 0.5) + (narrow ? 9 : 0);
  // a case has the same height in every row; heights are spread evenly by the golden ratio
  const offset = (index) => (((index * 0.61803) % 1) - 0.5) * (narrow ? 34 : 36);
  const root = svg("svg", { width, height: bottom + 44, viewBox: `0 0 ${width} ${bottom + 44}`, role: "img", "aria-label": describeDistributions(score, values) });
  root.append(axisX(ticks(low, high, Math.max(3, width / 110)), x, 4, bottom, score.heading, (left + right) / 2));
  if (raters !== null) {
    root.append(svg("line", { x1: x(raters), x2: x(raters), y1: 4, y2: bottom, class: "raters-line" }));
  }
  const dots = svg("g", { class: "dots" });
  const spots = [];
  DATA.methods.forEach((method, number) => {
    const y = centre(number);
    root.append(
      narrow
        ? svg("text", { x: left, y: y - 26, class: "row-label" }, shortened(method.name, Math.floor(width / 8.5)))
        : svg("text", { x: left - 12, y: y + 4, "text-anchor": "end", class: "row-label" }, shortened(method.name, 30)),
    );
    const column = [];
    values.forEach((row, index) => {
      if (row[number] === null) return;
      column.push(row[number]);
      const spot = { index, method: number, x: x(row[number]), y: y + offset(index) };
      spots.push(spot);
      dots.append(svg("circle", { cx: spot.x.toFixed(1), cy: spot.y.toFixed(1), r: 3 }));
    });
    if (column.length === 0) return;
    const sorted = [...column].sort((a, b) => a - b);
    const [first, middle, third] = [0.25, 0.5, 0.75].map((share) => x(quantile(sorted, share)));
    const half = narrow ? 15 : 18;
    dots.append(
      svg("rect", { x: first, y: y - half, width: Math.max(1, third - first), height: 2 * half, class: "box" }),
      svg("line", { x1: middle, x2: middle, y1: y - half, y2: y + half, class: "median" }),
      svg("path", { d: markerPath("D", 4.5), transform: `translate(${x(mean(column)).toFixed(1)} ${y})`, class: "diamond" }),
    );
  });
  for (const { means } of score.seeds) {
    means.forEach((value, number) => {
      if (value === null) return;
      const at = `translate(${x(value * score.scale).toFixed(1)} ${centre(number) + (narrow ? 20 : 23)})`;
      dots.append(svg("path", { d: markerPath("^", 4), transform: at, class: "seed" }));
    });
  }
  const followed = svg("g", { class: "followed" });
  root.append(dots, followed);
  const tip = el("p", { class: "tip", role: "status" }, " ");
  const nearest = (event) => {
    const box = root.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    let best = null;
    let distance = 18 ** 2;
    for (const spot of spots) {
      const away = (spot.x - px) ** 2 + (spot.y - py) ** 2;
      if (away < distance) [best, distance] = [spot, away];
    }
    return best;
  };
  root.addEventListener("pointermove", (event) => {
    const spot = nearest(event);
    followed.replaceChildren();
    root.classList.toggle("pointing", spot !== null);
    if (spot === null) {
      tip.textContent = " ";
      return;
    }
    const path = spots.filter((other) => other.index === spot.index);
    followed.append(
      svg("polyline", { points: path.map((p) => `${p.x},${p.y}`).join(" ") }),
      ...path.map((p) => svg("circle", { cx: p.x, cy: p.y, r: 5 })),
    );
    const parts = path.map((p) => `${DATA.methods[p.method].name} ${scoreText(DATA.cases[p.index].values[state.score][p.method], score)}`);
    tip.textContent = `${DATA.cases[spot.index].name}: ${parts.join(", ")}`;
  });
  root.addEventListener("click", (event) => {
    const spot = nearest(event);
    if (spot !== null) openCase(spot.index);
  });
  if (raters === null) return [root, tip];
  return [root, el("p", { class: "aside" }, `Dashed line: the raters' own agreement, ${fixed(raters)}.`), tip];
}

function describeDistributions(score, values) {
  const parts = DATA.methods.map((method, number) => {
    const column = values.map((row) => row[number]).filter((v) => v !== null).sort((a, b) => a - b);
    if (column.length === 0) return `${method.name} without a score`;
    return `${method.name} median ${fixed(quantile(column, 0.5))}, from ${fixed(column[0])} to ${fixed(column.at(-1))}`;
  });
  return `${score.heading} of every case: ${parts.join("; ")}`;
}

// --- reliability ----------------------------------------------------------------------------------------

function drawReliability(width) {
  const side = Math.min(width, 480);
  const [left, right, top, bottom] = [46, side - 12, 10, side - 40];
  const lines = DATA.reliability.map((one) => ({
    style: DATA.methods[one.method],
    error: one.error,
    points: one.confidence.map((c, bin) => [c, one.accuracy[bin], one.share[bin]]).filter((p) => p[0] !== null),
  }));
  const lowest = Math.min(...lines.flatMap((one) => one.points.map((p) => p[0])));
  const start = lowest >= 0.5 ? 0.5 : 0;
  const floor = Math.min(start, ...lines.flatMap((one) => one.points.map((p) => p[1])));
  const x = linear(start, 1, left, right);
  const y = linear(floor, 1, bottom, top);
  const words = lines.map((one) => `${one.style.name} ${fixed(one.error * 100)} %`).join(", ");
  const root = svg("svg", { width: side, height: side, viewBox: `0 0 ${side} ${side}`, role: "img", "aria-label": `Accuracy against confidence. Calibration error: ${words}` });
  root.append(
    axisX(ticks(start, 1, 5), x, top, bottom, "mean confidence in the bin", (left + right) / 2),
    axisY(ticks(floor, 1, 5), y, left, right),
    svg("line", { x1: x(start), y1: y(start), x2: x(1), y2: y(1), class: "diagonal" }),
    svg("text", { x: left + 6, y: top + 12, class: "axis-title" }, "accuracy"),
  );
  for (const one of lines) {
    const points = one.points.map(([c, a]) => [x(c), y(a)]);
    root.append(line(points, one.style));
    for (const [px, py] of points) {
      root.append(svg("path", { d: markerPath(one.style.marker, 4), transform: `translate(${px.toFixed(1)} ${py.toFixed(1)})`, ...ink(one.style, "marker") }));
    }
  }
  return [
    el("div", { class: "chart-pair" }, root, drawShares(Math.min(width, 480), lines, start)),
    legendOf(lines.map((one) => ({ style: one.style, text: `${one.style.name}: ECE ${fixed(one.error * 100)} %` }))),
  ];
}

function drawShares(side, lines, start) {
  const height = Math.round(side * 0.45);
  const [left, right, top, bottom] = [46, side - 12, 22, height - 40];
  const shares = lines.flatMap((one) => one.points.map((p) => p[2]));
  const least = Math.min(0, Math.floor(Math.log10(100 * Math.min(...shares))));
  const x = linear(start, 1, left, right);
  const y = linear(least, 2, bottom, top);
  const every = Math.ceil((3 - least) / 5);
  const marks = [];
  for (let power = 2; power >= least; power -= every) marks.push({ value: power, text: String(Number((10 ** power).toPrecision(1))) });
  const root = svg("svg", { width: side, height, viewBox: `0 0 ${side} ${height}`, role: "img", "aria-label": "Share of the voxels in each bin, in percent, on a logarithmic scale" });
  root.append(
    axisX(ticks(start, 1, 5), x, top, bottom, "mean confidence in the bin", (left + right) / 2),
    axisY(marks, y, left, right),
    svg("text", { x: left + 6, y: 12, class: "axis-title" }, "voxels (%)"),
  );
  for (const one of lines) root.append(line(one.points.map(([c, , share]) => [x(c), y(Math.log10(100 * share))]), one.style));
  return root;
}

// --- training -------------------------------------------------------------------------------------------

function drawCurves(width) {
  const series = DATA.curves[Number(byId("curve-select").value)];
  const height = Math.min(380, Math.max(240, width * 0.5));
  const [left, right, top, bottom] = [58, width - 12, 10, height - 40];
  const low = Math.min(...series.methods.flatMap((one) => one.low));
  const high = Math.max(...series.methods.flatMap((one) => one.high));
  const last = Math.max(...series.methods.flatMap((one) => one.step));
  const reach = high - low || Math.abs(high) || 1;
  const x = linear(0, last, left, right);
  const y = linear(low - reach * 0.03, high + reach * 0.03, bottom, top);
  const ends = series.methods.map((one) => `${DATA.methods[one.method].name} ends at ${one.mean.at(-1).toPrecision(3)}`);
  const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${series.name} over training steps: ${ends.join(", ")}` });
  root.append(
    axisX(ticks(0, last, Math.max(3, width / 130)), x, top, bottom, "step", (left + right) / 2),
    axisY(ticks(low - reach * 0.03, high + reach * 0.03, 5), y, left, right),
  );
  for (const one of series.methods) {
    const style = DATA.methods[one.method];
    const upper = one.step.map((step, at) => `${x(step).toFixed(1)},${y(one.high[at]).toFixed(1)}`);
    const lower = one.step.map((step, at) => `${x(step).toFixed(1)},${y(one.low[at]).toFixed(1)}`).reverse();
    root.append(svg("polygon", { points: [...upper, ...lower].join(" "), ...ink(style, "band") }));
  }
  for (const one of series.methods) {
    const style = DATA.methods[one.method];
    const points = one.step.map((step, at) => [x(step), y(one.mean[at])]);
    root.append(points.length > 1 ? line(points, style) : svg("path", { d: markerPath(style.marker, 4), transform: `translate(${points[0]})`, ...ink(style, "marker") }));
  }
  return [root, legendOf(series.methods.map((one) => ({ style: DATA.methods[one.method], marker: false, text: `${DATA.methods[one.method].name} (${one.num_folds} ${one.num_folds === 1 ? "fold" : "folds"})` })))];
}
