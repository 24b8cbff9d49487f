"use strict";
// The live page: it asks for the state of the run again and again and shows it as text and with the charts of the report.
const PERIOD = 3000; // milliseconds
let tag = "";
let failures = 0;

function byId(id) {
  return document.getElementById(id);
}

function element(name, text, parent) {
  const made = document.createElement(name);
  made.textContent = text;
  parent.append(made);
  return made;
}

function showTiles(tiles) {
  const list = byId("tiles");
  list.replaceChildren();
  list.hidden = tiles.length === 0;
  for (const [label, value] of tiles) {
    const box = element("div", "", list);
    element("dt", label, box);
    element("dd", value, box);
  }
}

function showTable(id, table) {
  const place = byId(id);
  place.replaceChildren();
  if (!table) return;
  const words = table.columns.map((name, i) => i === 0 || table.words.includes(name));
  const cell = (kind, text, row, i) => {
    const made = element(kind, text, row);
    if (words[i]) made.className = "words";
  };
  const head = element("tr", "", element("thead", "", place));
  table.columns.forEach((name, i) => cell("th", name, head, i));
  const body = element("tbody", "", place);
  for (const values of table.rows) {
    const row = element("tr", "", body);
    values.forEach((value, i) => cell(i === 0 ? "th" : "td", value, row, i));
  }
}

async function showCharts(found) {
  for (const place of document.querySelectorAll("[data-live]")) {
    const name = place.dataset.live;
    const chart = Object.hasOwn(found, name) ? found[name] : null;
    const shown = place.closest("figure");
    shown.hidden = chart === null;
    if (chart === null) continue;
    shown.closest("section").hidden = false;
    place.dataset.chart = name;
    place.setAttribute("aria-label", chart.label);
    place.style.minHeight = `${chart.figure.layout.height}px`;
    shown.querySelector("figcaption").textContent = chart.caption;
    let known = charts.find((one) => one.place === place);
    if (known === undefined) charts.push((known = { place }));
    known.figure = chart.figure;
    await draw(known, currentTheme());
  }
}

function showProblem(text) {
  byId("problem").textContent = text;
  byId("problem").hidden = text === "";
}

async function show(state) {
  showProblem(state.problem ?? "");
  if (state.problem !== null) return; // what was shown stays
  byId("title").textContent = state.title;
  document.title = `${state.title} – greedynas`;
  byId("now").textContent = state.now;
  const bar = byId("progress");
  bar.hidden = state.progress === null;
  if (state.progress !== null) {
    bar.max = Math.max(state.progress.total, 1);
    bar.value = state.progress.done;
  }
  showTiles(state.tiles);
  showTable("table-plan", state.tables.plan);
  showTable("table-pool", state.tables.pool);
  byId("no-pool").hidden = state.tables.pool !== null;
  byId("log").textContent = state.log.join("\n");
  await showCharts(state.charts);
  root.dataset.shown = String(Number(root.dataset.shown ?? 0) + 1);
}

async function refresh() {
  try {
    const answer = await fetch("state", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    failures = 0;
    if (answer.status === 200) {
      const state = await answer.json();
      tag = answer.headers.get("ETag") ?? "";
      await show(state);
    } else if (answer.status !== 304) {
      showProblem("This address is no longer valid: open the one that greedynas watch has printed last.");
    } else if (!byId("problem").hidden && byId("problem").dataset.lost) {
      showProblem("");
    }
    delete byId("problem").dataset.lost;
  } catch {
    failures += 1;
    byId("problem").dataset.lost = "true";
    showProblem("greedynas watch has ended; this is its last state.");
  }
}

addEventListener("DOMContentLoaded", async () => {
  dark = JSON.parse(byId("data").textContent).dark;
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise((resume) => setTimeout(resume, PERIOD * Math.min(1 + failures, 10)));
  }
});
