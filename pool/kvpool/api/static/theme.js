// Light or dark: as the reader chose, else as the reader's system is. Before anything is drawn, so that nothing flashes.
"use strict";

const systemDark = matchMedia("(prefers-color-scheme: dark)");

function theme() {
  const chosen = localStorage.getItem("kvpool-theme");
  return chosen === "light" || chosen === "dark" ? chosen : "system";
}

function applyTheme() {
  document.documentElement.dataset.theme = theme() === "system" ? (systemDark.matches ? "dark" : "light") : theme();
}

function chooseTheme(chosen) {
  if (chosen === "system") localStorage.removeItem("kvpool-theme");
  else localStorage.setItem("kvpool-theme", chosen);
  applyTheme();
}

systemDark.addEventListener("change", applyTheme);
applyTheme();
