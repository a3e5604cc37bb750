// Start all sections.
for (const key of document.querySelectorAll(".key")) key.append(lineKey(DATA.methods[Number(key.dataset.method)]));

const charts = [
  chart("distribution-chart", drawDistributions),
  chart("reliability-chart", drawReliability),
  chart("curve-chart", drawCurves),
];
state.listeners.push(charts[0], () => {
  for (const matrix of document.querySelectorAll(".matrix")) matrix.hidden = Number(matrix.dataset.score) !== state.score;
});
byId("curve-select")?.addEventListener("change", charts[2]);
// a shadow at the right edge of a table that continues there
for (const box of document.querySelectorAll(".scroll")) {
  const follow = () => box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  const watch = new ResizeObserver(follow);
  for (const node of [box, box.firstElementChild]) watch.observe(node);
  box.addEventListener("scroll", follow);
}
startCases();
startBrowser();
for (const select of document.querySelectorAll(".score-select")) {
  select.addEventListener("change", () => setScore(Number(select.value)));
}
