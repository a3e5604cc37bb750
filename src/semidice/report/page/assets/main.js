// Start all sections.
for (const key of document.querySelectorAll(".key")) key.append(lineKey(DATA.methods[Number(key.dataset.method)]));

const charts = [
  chart("distribution-chart", drawDistributions),
  chart("reliability-chart", drawReliability),
  chart("curve-chart", drawCurves),
  chart("volume-chart", drawVolumes),
];
state.listeners.push(charts[0], () => {
  for (const matrix of document.querySelectorAll(".matrix")) matrix.hidden = Number(matrix.dataset.score) !== state.score;
});
byId("curve-select")?.addEventListener("change", charts[2]);
byId("decision-select")?.addEventListener("change", (event) => {
  for (const part of document.querySelectorAll(".decision")) part.hidden = part.dataset.score !== event.target.value;
});
startVolumes(charts[3]);
for (const box of document.querySelectorAll(".scroll")) followScroll(box);
startCases();
startBrowser();
for (const select of document.querySelectorAll(".score-select")) {
  select.addEventListener("change", () => setScore(Number(select.value)));
}
