"use strict";
// one choice for all parts of the page that show the same score, rule or class
const choose = (name, value) => {
  for (const part of document.querySelectorAll(`[data-${name}]`)) part.hidden = part.dataset[name] !== value;
  for (const select of document.querySelectorAll(`[data-chooses="${name}"]`)) select.value = value;
};
for (const select of document.querySelectorAll("[data-chooses]")) {
  select.addEventListener("change", () => choose(select.dataset.chooses, select.value));
}

// a case is followed through the methods of a chart
for (const chart of document.querySelectorAll(".chart")) {
  const follow = (event) => {
    const name = event.target.closest("[data-case]")?.dataset.case;
    for (const point of chart.querySelectorAll("[data-case]")) {
      point.classList.toggle("followed", event.type === "pointerover" && point.dataset.case === name);
    }
  };
  chart.addEventListener("pointerover", follow);
  chart.addEventListener("pointerout", follow);
}

// the case table: sorted by a column, numbers first from the largest; filtered by name, patient and fold
for (const table of document.querySelectorAll(".sortable")) {
  const body = table.tBodies[0];
  for (const head of table.tHead.rows[0].cells) {
    head.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = (row) => row.cells[head.cellIndex].textContent.replace("−", "-");
      const order = (a, b) => a - b || a.localeCompare(b, "en", { numeric: true });
      const rows = [...body.rows].sort((a, b) => order(key(a), key(b)) * (down ? -1 : 1));
      body.append(...rows);
    });
  }
}
document.getElementById("filter").addEventListener("input", (event) => {
  const words = event.target.value.toLowerCase();
  for (const row of document.querySelectorAll(".sortable tbody tr")) {
    row.hidden = ![0, 1, 2].some((cell) => row.cells[cell].textContent.toLowerCase().includes(words));
  }
});

// images: one case at a time
const images = document.getElementById("images");
if (images) {
  const cases = [...images.querySelectorAll(".case")];
  let shown = 0;
  const show = (number) => {
    shown = (number + cases.length) % cases.length;
    cases.forEach((each, at) => { each.hidden = at !== shown; });
  };
  const follow = () => {
    const found = cases.findIndex((each) => `#${each.id}` === location.hash);
    if (found >= 0) {
      show(found);
      images.scrollIntoView();
    }
  };
  addEventListener("hashchange", follow);
  follow();
  for (const button of images.querySelectorAll("[data-step]")) {
    button.addEventListener("click", () => show(shown + Number(button.dataset.step)));
  }
  images.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step && !event.target.matches("input, select")) show(shown + step);
  });
  for (const select of images.querySelectorAll("[data-sets]")) {
    select.addEventListener("change", () => { images.dataset[select.dataset.sets] = select.value; });
  }
  for (const range of images.querySelectorAll("[data-style]")) {
    range.addEventListener("input", () => {
      images.style.setProperty(range.dataset.style, range.value + (range.dataset.unit ?? ""));
    });
  }
  document.getElementById("outlines").addEventListener("change", (event) => {
    images.classList.toggle("no-outlines", !event.target.checked);
  });
}
