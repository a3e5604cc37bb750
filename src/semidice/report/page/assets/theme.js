// Light or dark, by the system's preference until the button is pressed.
(() => {
  "use strict";
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try {
    chosen = localStorage.getItem("semidice-theme");
  } catch {
    // a browser may not store anything for a local file
  }
  const apply = () => {
    root.dataset.theme = chosen ?? (system.matches ? "dark" : "light");
    const button = document.getElementById("theme");
    if (button) button.textContent = root.dataset.theme === "dark" ? "Light theme" : "Dark theme";
  };
  apply();
  system.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      chosen = root.dataset.theme === "dark" ? "light" : "dark";
      try {
        localStorage.setItem("semidice-theme", chosen);
      } catch {
        // then the choice holds until the page is closed
      }
      apply();
    });
  });
})();
