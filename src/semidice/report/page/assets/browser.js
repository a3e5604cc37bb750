// The image browser: one case at a time, every layer as a small panel, and the chosen layer large.
const viewer = { order: [], at: 0, layer: 0, shown: null, turn: 0 };

const RATERS_DISAGREE = { kind: "disagreement", place: null, name: "disagreement of the raters" };

function layersOf() {
  const prefix = { prediction: "", difference: "difference, ", disagreement: "disagreement, " };
  const ofMethods = (kind) => LAYOUT.methods.map((method, place) => ({ kind, place, name: `${prefix[kind]}${DATA.methods[method].name}` }));
  return [
    { kind: "image", name: "image and raters" },
    { kind: "label", name: "soft label" },
    ...(LAYOUT.has_truth ? [{ kind: "truth", name: "true probability" }] : []),
    ...ofMethods("prediction"),
    ...ofMethods("difference"),
    ...(LAYOUT.raters.length > 1 ? [RATERS_DISAGREE] : []),
    ...ofMethods("disagreement"),
  ];
}
const LAYERS = LAYOUT ? layersOf() : [];

const chosenClass = () => Number(byId("class")?.value ?? 0);
const chosenChannel = () => Number(byId("channel")?.value ?? 0);

// --- order of the cases ---------------------------------------------------------------------------------

function orderKey(kind, picture) {
  const values = DATA.cases[picture.case].values[state.score];
  const method = byId("order-method")?.value ?? "";
  const known = (method === "" ? values : [values[Number(method)]]).filter((value) => value !== null);
  if (kind === "differ") return spread(values) === null ? null : -spread(values);
  if (known.length === 0) return null;
  const better = DATA.scores[state.score].higher_is_better ? mean(known) : -mean(known);
  return kind === "worst" ? better : -better;
}

function sortPictures() {
  const kind = byId("order").value;
  const name = (number) => DATA.cases[DATA.pictures[number].case].name;
  const keys = DATA.pictures.map((picture) => (kind === "name" ? 0 : orderKey(kind, picture)));
  viewer.order = DATA.pictures.map((_, number) => number).sort((a, b) => {
    if (keys[a] === null || keys[b] === null) return (keys[a] === null) - (keys[b] === null);
    return keys[a] - keys[b] || compare(name(a), name(b));
  });
  const select = byId("case-select");
  select.replaceChildren(...viewer.order.map((number, place) => el("option", { value: place }, `${place + 1}. ${name(number)}`)));
  select.value = String(viewer.at);
}

function resort({ first }) {
  const current = viewer.order[viewer.at];
  sortPictures();
  show(first ? 0 : Math.max(0, viewer.order.indexOf(current)));
}

function openCase(index) {
  if (!pictureOf.has(index)) return;
  show(viewer.order.indexOf(pictureOf.get(index)));
  byId("viewer").focus({ preventScroll: true });
  byId("browser").scrollIntoView();
}

// --- drawing --------------------------------------------------------------------------------------------

async function show(at) {
  viewer.at = Math.min(Math.max(0, at), viewer.order.length - 1);
  byId("case-select").value = String(viewer.at);
  byId("previous").disabled = viewer.at === 0;
  byId("next").disabled = viewer.at === viewer.order.length - 1;
  viewer.turn += 1;
  const turn = viewer.turn;
  const pictures = await loadPictures(viewer.order[viewer.at]);
  // the user has chosen another case meanwhile
  if (turn !== viewer.turn) return;
  viewer.shown = pictures;
  drawViewer();
  drawOneCase();
  for (const next of [viewer.at + 1, viewer.at - 1]) if (next in viewer.order) loadPictures(viewer.order[next]);
}

function drawViewer() {
  const pictures = viewer.shown;
  if (!pictures) return;
  const whole = { x: 0, y: 0, width: pictures.width, height: pictures.height };
  viewer.frame = byId("zoom").checked ? zoomWindow(pictures, chosenClass()) : whole;
  byId("panels").replaceChildren(...LAYERS.map((layer, number) => {
    const drawn = panelOf(pictures, layer, viewer.frame, layer.kind === "image" && byId("outlines").checked);
    return el("button", { type: "button", class: "panel", onclick: () => chooseLayer(number) }, drawn, el("span", {}, layer.name));
  }));
  drawStage();
}

// The chosen layer; the panels are not drawn again.
function drawStage() {
  const layer = LAYERS[viewer.layer];
  const draw = (one) => panelOf(viewer.shown, one, viewer.frame, byId("outlines").checked);
  // what a network expects is seen beside what the raters did
  const isPair = layer.kind === "disagreement" && layer.place !== null && LAYERS.includes(RATERS_DISAGREE);
  const titled = (one) => el("figure", {}, draw(one), el("figcaption", {}, one.name));
  const drawn = isPair ? el("div", { class: "pair" }, titled(RATERS_DISAGREE), titled(layer)) : draw(layer);
  byId("stage").replaceChildren(drawn, el("figcaption", {}, stageCaption(isPair)));
  [...byId("panels").children].forEach((panel, number) => panel.setAttribute("aria-pressed", String(number === viewer.layer)));
  byId("legend").replaceChildren(...legendFor(LAYERS[viewer.layer].kind));
}

function stageCaption(isPair) {
  const { picture } = viewer.shown;
  const [height, width] = picture.size;
  const parts = [isPair ? "entropy of the raters' mean and of the prediction, on one scale" : LAYERS[viewer.layer].name];
  if (picture.slice_number !== null) parts.push(`slice ${picture.slice_number + 1} of ${picture.num_slices}, the one with most foreground`);
  if (picture.full_size[0] !== height) parts.push(`shown at ${height} × ${width} of ${picture.full_size.join(" × ")} pixels`);
  return parts.join("; ");
}

function canvasOf(pixels, pictures, frame, className) {
  const canvas = el("canvas", { width: frame.width, height: frame.height, class: className });
  canvas.getContext("2d").putImageData(new ImageData(pixels, pictures.width, pictures.height), -frame.x, -frame.y);
  return canvas;
}

function overlayOf(pictures, layer) {
  const number = chosenClass();
  if (layer.kind === "label") return rampPixels(pictures.label(number));
  if (layer.kind === "truth") return rampPixels(pictures.truth(number));
  if (layer.kind === "prediction") return rampPixels(pictures.prediction(layer.place, number));
  if (layer.kind === "disagreement") return rampPixels(pictures.entropy(layer.place), ENTROPY_COLOURS, MAX_BITS);
  if (layer.kind === "difference") return differencePixels(pictures.difference(layer.place, number));
  return null;
}

function panelOf(pictures, layer, frame, outlined) {
  const shape = `aspect-ratio: ${frame.width} / ${frame.height * pictures.picture.aspect}`;
  const name = `${DATA.cases[pictures.picture.case].name}: ${layer.name}`;
  const box = el("div", { class: "picture", style: shape, role: "img", "aria-label": name });
  box.append(canvasOf(greyPixels(pictures.greys[chosenChannel()]), pictures, frame, "grey"));
  const overlay = overlayOf(pictures, layer);
  if (overlay) box.append(canvasOf(overlay, pictures, frame, "overlay"));
  if (outlined) box.append(outlinesOf(pictures, frame));
  return box;
}

// A dark line below is visible in the gaps of the dashes, on light and on dark tissue.
function outlinesOf(pictures, frame) {
  const root = svg("svg", { class: "outlines", viewBox: `${frame.x} ${frame.y} ${frame.width} ${frame.height}`, preserveAspectRatio: "none" });
  const paths = LAYOUT.raters.map((_, number) =>
    pictures.picture.present[number] ? outlinePath(pictures.rater(number, chosenClass()), pictures.width, pictures.height) : "",
  );
  for (const d of paths) if (d) root.append(svg("path", { d, class: "under" }));
  paths.forEach((d, number) => {
    const style = LAYOUT.raters[number];
    if (d) root.append(svg("path", { d, class: "rater", stroke: style.colour, "stroke-dasharray": style.dashes.join(" ") }));
  });
  return root;
}

function legendFor(kind) {
  const parts = [];
  const { present } = viewer.shown.picture;
  if (byId("outlines").checked) {
    parts.push(legendOf(LAYOUT.raters.map((style, number) => ({ style, marker: false, text: present[number] ? style.name : `${style.name} (did not look)` }))));
  }
  if (kind === "difference") {
    parts.push(el("p", { class: "scale" }, el("span", { class: "swatch too-high" }), " prediction higher than the soft label, ", el("span", { class: "swatch too-low" }), " lower"));
  } else if (kind !== "image") {
    const colours = kind === "disagreement" ? ENTROPY_COLOURS : COLOURS;
    const stops = [0, 51, 102, 153, 204, 255].map((at) => `rgb(${[0, 1, 2].map((part) => colours[at * 3 + part]).join(",")})`);
    const most = kind === "disagreement" ? ` ${Number(MAX_BITS.toFixed(2))} bit  entropy over all classes: 0 where all agree` : " 1  probability";
    parts.push(el("p", { class: "scale" }, "0 ", el("span", { class: "ramp", style: `background: linear-gradient(to right, ${stops.join(",")})` }), most));
  }
  return parts;
}

// The scores of the shown case, the same as in the case table.
function drawOneCase() {
  const { picture } = viewer.shown;
  const one = DATA.cases[picture.case];
  const where = [hasPatients ? `patient ${one.patient}` : "", hasFolds ? `fold ${one.fold}` : ""].filter((part) => part);
  byId("case-status").textContent = `${one.name}, ${viewer.at + 1} of ${viewer.order.length}${where.length ? ` (${where.join(", ")})` : ""}`;
  byId("one-case").replaceChildren(
    el("caption", { class: "hidden" }, `Scores of ${one.name}`),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "score"), ...DATA.methods.map((method) => el("th", { scope: "col" }, ...breakable(method.name))))),
    el("tbody", {}, ...DATA.scores.map((score, number) => {
      const known = one.values[number].filter((value) => value !== null);
      const best = spread(one.values[number]) ? (score.higher_is_better ? Math.max(...known) : Math.min(...known)) : undefined;
      return el("tr", {}, el("th", { scope: "row" }, ...breakable(score.heading)), ...one.values[number].map((value) => el("td", { class: value !== null && value === best ? "number leads" : "number" }, scoreText(value, score))));
    })),
  );
}

function chooseLayer(number) {
  viewer.layer = Math.min(Math.max(0, number), LAYERS.length - 1);
  if (viewer.shown) drawStage();
}

function readOut(event) {
  const picture = event.target.closest(".picture");
  if (!picture) return;
  const box = picture.getBoundingClientRect();
  const { frame, shown } = viewer;
  const x = frame.x + Math.floor(((event.clientX - box.left) / box.width) * frame.width);
  const y = frame.y + Math.floor(((event.clientY - box.top) / box.height) * frame.height);
  if (x < frame.x || y < frame.y || x >= frame.x + frame.width || y >= frame.y + frame.height) return;
  const at = y * shown.width + x;
  const bits = LAYERS[viewer.layer].kind === "disagreement";
  const parts = [bits ? `bits: raters ${fixed(shown.entropy(null)[at])}` : `soft label ${fixed(shown.label(chosenClass())[at])}`];
  if (LAYOUT.has_truth && !bits) parts.push(`true ${fixed(shown.truth(chosenClass())[at])}`);
  LAYOUT.methods.forEach((method, place) => {
    const values = bits ? shown.entropy(place) : shown.prediction(place, chosenClass());
    parts.push(`${DATA.methods[method].name} ${fixed(values[at])}`);
  });
  byId("readout").textContent = `row ${y}, column ${x}: ${parts.join(", ")}`;
}

// --- controls -------------------------------------------------------------------------------------------

function setOpacity(percent) {
  const value = Math.min(100, Math.max(0, percent));
  byId("opacity").value = String(value);
  byId("opacity-shown").textContent = `${value} %`;
  byId("viewer").style.setProperty("--opacity", String(value / 100));
}

function toggle(id) {
  byId(id).checked = !byId(id).checked;
  drawViewer();
}

function otherKind() {
  const { kind, place } = LAYERS[viewer.layer];
  const other = { prediction: "difference", difference: "disagreement", disagreement: "prediction" }[kind];
  if (other) chooseLayer(LAYERS.findIndex((layer) => layer.kind === other && layer.place === place));
}

const KEYS = {
  ArrowRight: () => show(viewer.at + 1),
  ArrowLeft: () => show(viewer.at - 1),
  ArrowDown: () => chooseLayer(viewer.layer + 1),
  ArrowUp: () => chooseLayer(viewer.layer - 1),
  Home: () => show(0),
  End: () => show(viewer.order.length - 1),
  "+": () => setOpacity(Number(byId("opacity").value) + 10),
  "=": () => setOpacity(Number(byId("opacity").value) + 10),
  "-": () => setOpacity(Number(byId("opacity").value) - 10),
  d: otherKind,
  o: () => toggle("outlines"),
  z: () => toggle("zoom"),
};

function pressKey(event) {
  const action = KEYS[event.key];
  const { tagName, type } = event.target;
  // lists and the slider use the arrows themselves
  const taken = tagName === "SELECT" || (type === "range" && event.key.length > 1);
  if (!action || taken || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  action();
}

function startBrowser() {
  if (!LAYOUT) return;
  byId("order").addEventListener("change", () => resort({ first: true }));
  byId("order-method")?.addEventListener("change", () => resort({ first: true }));
  byId("previous").addEventListener("click", () => show(viewer.at - 1));
  byId("next").addEventListener("click", () => show(viewer.at + 1));
  byId("case-select").addEventListener("change", (event) => show(Number(event.target.value)));
  byId("opacity").addEventListener("input", (event) => setOpacity(Number(event.target.value)));
  for (const id of ["outlines", "zoom", "channel", "class"]) byId(id)?.addEventListener("change", drawViewer);
  byId("viewer").addEventListener("keydown", pressKey);
  byId("stage").addEventListener("pointermove", readOut);
  state.listeners.push(() => resort({ first: false }));
  setOpacity(70);
  sortPictures();
  show(0);
}
