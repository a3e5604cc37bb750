// The data, the score that all sections show, and functions that make elements and format numbers.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

// Two decimals, rounded like Python: toFixed rounds a tie up, Python to the even digit. With two decimals, only
// odd eighths are ties. A number that is rounded to 0 has no sign.
function fixed(value) {
  const size = Math.abs(value);
  const text = (size * 8) % 4 === 1 ? (size - 0.001).toFixed(2) : size.toFixed(2);
  return (value < 0 && text !== "0.00" ? "−" : "") + text;
}
// A name that may be broken after its underscores.
const breakable = (name) => name.split(/(?<=_)/).flatMap((part, at) => (at ? [el("wbr"), part] : [part]));
const scoreText = (value, score) => (value === null ? "–" : fixed(value * score.scale));

const state = { score: 0, listeners: [] };
function setScore(number) {
  state.score = number;
  for (const select of document.querySelectorAll(".score-select")) select.value = String(number);
  for (const listener of state.listeners) listener();
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// A shadow at the right edge of a table or chart that continues there.
function followScroll(box) {
  const follow = () => box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  const watch = new ResizeObserver(follow);
  for (const node of [box, box.firstElementChild]) watch.observe(node);
  box.addEventListener("scroll", follow);
}

// The quantile of sorted values, interpolated linearly, like numpy.
function quantile(sorted, share) {
  const at = share * (sorted.length - 1);
  const below = Math.floor(at);
  const above = Math.min(below + 1, sorted.length - 1);
  return sorted[below] + (sorted[above] - sorted[below]) * (at - below);
}

// matplotlib's markers as paths, centred at 0, 0.
function markerPath(marker, r) {
  const paths = {
    o: `M${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`,
    s: `M${-r} ${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
    "^": `M0 ${-r}L${r} ${r}H${-r}z`,
    v: `M0 ${r}L${r} ${-r}H${-r}z`,
    x: `M${-r} ${-r}L${r} ${r}M${r} ${-r}L${-r} ${r}`,
    "<": `M${-r} 0L${r} ${-r}V${r}z`,
    ">": `M${r} 0L${-r} ${-r}V${r}z`,
    P: `M${-r} ${-r / 3}h${(2 * r) / 3}v${(-2 * r) / 3}h${(2 * r) / 3}v${(2 * r) / 3}h${(2 * r) / 3}v${(2 * r) / 3}h${(-2 * r) / 3}v${(2 * r) / 3}h${(-2 * r) / 3}v${(-2 * r) / 3}h${(-2 * r) / 3}z`,
    "*": `M${[...Array(10).keys()].map((corner) => [1.3, 0.55][corner % 2] * r).map((size, corner) => `${(size * Math.sin((corner * Math.PI) / 5)).toFixed(2)} ${(-size * Math.cos((corner * Math.PI) / 5)).toFixed(2)}`).join("L")}z`,
    D: `M0 ${-1.3 * r}L${1.3 * r} 0L0 ${1.3 * r}L${-1.3 * r} 0z`,
  };
  return paths[marker];
}

// Attributes that draw in the colour of a method or rater, for the light or dark theme.
const ink = (style, kind = "") => ({ class: `ink ${kind}`, style: `--on-light: ${style.on_light}; --on-dark: ${style.on_dark}` });

// A short piece of the line of a method or rater, for a legend.
function lineKey(style, marker = true) {
  const key = svg("svg", { class: "key-line", width: 30, height: 12, viewBox: "0 0 30 12", "aria-hidden": "true" });
  key.append(
    svg("line", {
      x1: 1, x2: 29, y1: 6, y2: 6, "stroke-width": 2.2, "stroke-dasharray": style.dashes.join(" "), ...ink(style),
    }),
  );
  if (marker) {
    key.append(
      svg("path", { d: markerPath(style.marker, 3.4), transform: "translate(15 6)", ...ink(style, "marker") }),
    );
  }
  return key;
}
