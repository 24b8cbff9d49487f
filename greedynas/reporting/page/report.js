"use strict";
// The theme is set first, so that the page does not flash; the charts follow when plotly.js at the end of the page is loaded.
const STORE = "greedynas-report-theme";
const root = document.documentElement;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const charts = []; // {place, figure}
let dark = {}; // maps the colours of the figures to those of the dark theme

function remembered() {
  try {
    return localStorage.getItem(STORE);
  } catch {
    return null; // a page from a file may have no storage
  }
}

function remember(theme) {
  try {
    localStorage.setItem(STORE, theme);
  } catch {
    // the choice then lasts until the page is closed
  }
}

function currentTheme() {
  return root.dataset.theme || (prefersDark.matches ? "dark" : "light");
}

if (["dark", "light"].includes(remembered())) root.dataset.theme = remembered();

function recoloured(value, key, theme) {
  if (typeof value === "string") {
    return (theme === "dark" && /color/i.test(key) && dark[value]) || value;
  }
  if (Array.isArray(value)) {
    // Only colour scales have colours in arrays; data is passed on unchanged.
    return /colorscale/i.test(key) ? value.map((item) => recoloured(item, key, theme)) : value;
  }
  if (value && typeof value === "object") {
    return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, recoloured(inner, name, theme)]));
  }
  return value;
}

function template() {
  const style = getComputedStyle(root);
  const colour = (name) => style.getPropertyValue(name).trim();
  const family = getComputedStyle(document.body).fontFamily;
  const axis = {
    gridcolor: colour("--grid"), zerolinecolor: colour("--line"), linecolor: colour("--line"),
    tickcolor: colour("--line"), tickfont: { color: colour("--muted") }, title: { font: { color: colour("--muted") }, standoff: 10 },
  };
  return {
    layout: {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family, size: 12, color: colour("--text") },
      xaxis: axis, yaxis: axis,
      hoverlabel: { bgcolor: colour("--surface"), bordercolor: colour("--muted"), font: { family, color: colour("--text"), size: 12 }, align: "left", namelength: -1 },
      annotationdefaults: { font: { color: colour("--muted"), size: 11 } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--muted"), activecolor: colour("--accent") },
    },
  };
}

function draw({ place, figure }, theme, width) {
  const layout = recoloured(figure.layout, "layout", theme);
  Object.assign(layout, { template: template(), uirevision: "kept", autosize: width === undefined, width });
  // On a touch screen a finger on a chart scrolls the page.
  if (matchMedia("(pointer: coarse)").matches) layout.dragmode = false;
  const data = figure.data.map((trace) => recoloured(trace, "trace", theme));
  return Plotly.react(place, data, layout, {
    responsive: true, displaylogo: false, scrollZoom: false, showTips: false,
    modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"],
    toImageButtonOptions: { filename: place.dataset.chart, scale: 2 },
  });
}

function showTheme() {
  const theme = currentTheme();
  const button = document.getElementById("theme");
  button.textContent = theme === "dark" ? "Light theme" : "Dark theme";
  button.setAttribute("aria-pressed", String(theme === "dark"));
  charts.forEach((chart) => draw(chart, theme));
}

document.addEventListener("DOMContentLoaded", async () => {
  const button = document.getElementById("theme");
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = currentTheme() === "dark" ? "light" : "dark";
    remember(root.dataset.theme);
    showTheme();
  });
  prefersDark.addEventListener("change", showTheme);
  const data = JSON.parse(document.getElementById("data").textContent);
  dark = data.dark;
  showTheme();
  for (const place of document.querySelectorAll("[data-chart]")) {
    const chart = { place, figure: data.figures[place.dataset.chart] };
    charts.push(chart);
    await draw(chart, currentTheme());
    await new Promise((resume) => setTimeout(resume)); // the page stays responsive in between
  }
  root.dataset.drawn = String(charts.length);
});

// Printed pages use the light theme, and paper is narrower than most screens.
addEventListener("beforeprint", () => {
  root.dataset.screenTheme = root.dataset.theme || "";
  root.dataset.theme = "light";
  document.querySelectorAll("details").forEach((part) => { part.open = true; });
  charts.forEach((chart) => draw(chart, "light", 680));
});
addEventListener("afterprint", () => {
  if (root.dataset.screenTheme) root.dataset.theme = root.dataset.screenTheme;
  else delete root.dataset.theme;
  showTheme();
});
