"use strict";

// The page: asks for the runs every two seconds, and for what has changed in those that are shown.

(() => {
  const POLL_MS = 2000;
  const NUM_COLORS = 10;
  const SHOWN_AT_FIRST = 10; // runs, the most recently changed
  const CHIPS = { running: "good", finished: "", stopped: "warn", failed: "bad", "no heartbeat": "bad" };
  const LABELS = ["Training loss", "Validation loss", "Tokens/s", "MFU", "Memory", "Time", "Left", "Dollars"];

  const embedded = document.getElementById("data");
  const exported = embedded && JSON.parse(embedded.textContent);
  const byId = (id) => document.getElementById(id);
  const dark = matchMedia("(prefers-color-scheme: dark)");

  // hidden: the runs that are not drawn; null for all but the newest ones.
  const state = { axis: "steps", log: false, whole: false, hidden: null, zoom: null, runs: [] };
  const loaded = new Map(); // by run: axis, points, metrics, lines, samples; detail of the zoomed range
  const colors = new Map(); // by run: a number, in the order of appearance
  const rows = new Map(); // by run: the elements of its row

  // Where answers come from: the server, or the page itself.

  async function ask(path, parameters) {
    if (exported) return answerFromPage(path, parameters);
    const answer = await fetch(`${path}?${new URLSearchParams(parameters)}`);
    if (answer.status === 404) return null; // the run was removed meanwhile
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    return answer.json();
  }

  function answerFromPage(path, parameters) {
    if (path === "runs") return exported;
    return path === "series" ? exported.series[parameters.x][parameters.run] : exported.samples[parameters.run];
  }

  // What is shown.

  function newestRuns() {
    const newest = [...state.runs].sort((a, b) => b.changed - a.changed).slice(0, SHOWN_AT_FIRST);
    return new Set(newest.map((run) => run.name));
  }

  function shownRuns() {
    const newest = newestRuns();
    return state.runs.filter(({ name }) => (state.hidden ? !state.hidden.has(name) : newest.has(name)));
  }

  function colorOf(name) {
    if (!colors.has(name)) colors.set(name, colors.size % NUM_COLORS);
    return `--run-${colors.get(name)}`;
  }

  let drawnNames = "";

  const namesOf = (runs) => JSON.stringify(runs.map((run) => run.name));

  function linesOf(run) {
    const { lines, detail } = loaded.get(run.name);
    return state.zoom && detail?.zoom === state.zoom ? detail.lines : lines;
  }

  function draw() {
    const shown = shownRuns();
    drawnNames = namesOf(shown);
    const runs = shown.filter((run) => loaded.get(run.name)?.axis === state.axis)
      .map((run) => ({ name: run.name, color: cssColor(colorOf(run.name)), lines: linesOf(run) }));
    const { axis, log, whole, zoom } = state;
    const view = { axis, log, whole, theme: dark.matches, isZoomed: Boolean(zoom), range: zoom ?? wholeRange(runs) };
    for (const chart of charts) chart.show(runs, view);
    byId("machine-section").hidden = !byId("machine").querySelector(".chart:not([hidden])");
    byId("reset").hidden = !state.zoom;
    const isEmpty = state.runs.length > 0 && !document.querySelector(".chart:not([hidden])");
    const why = !shown.length ? "No run is selected: select one in the table."
      : state.axis === "dollars" ? "These runs have no price: set usd_per_hour." : "These runs have no records yet.";
    setText(byId("nothing"), isEmpty && (runs.length || !shown.length) ? why : "");
    byId("nothing").hidden = !byId("nothing").textContent;
  }

  function wholeRange(runs) {
    let [low, high] = [Infinity, -Infinity];
    for (const { lines } of runs) {
      for (const { x } of Object.values(lines)) {
        if (!x.length) continue;
        low = Math.min(low, x[0]);
        high = Math.max(high, x[x.length - 1]);
      }
    }
    if (low > high) return [0, 1];
    return low === high ? [low - 1, high + 1] : [low, high];
  }

  // A range, or null for all of x; again, for all losses.
  function zoom(range) {
    if (!range && !state.zoom) return showWhole(!state.whole);
    state.zoom = range;
    draw();
    refresh();
  }

  const charts = [
    ...TRAINING_CHARTS.map((spec) => new Chart(spec, byId("training"), zoom)),
    ...MACHINE_CHARTS.map((spec) => new Chart(spec, byId("machine"), zoom)),
  ];

  // The table.

  function showTable() {
    const [body, shown] = [byId("runs").tBodies[0], new Set(shownRuns().map((run) => run.name))];
    const names = new Set(state.runs.map((run) => run.name));
    for (const [name, row] of rows) {
      if (names.has(name)) continue;
      row.element.remove();
      rows.delete(name);
    }
    for (const name of [...names].sort()) colorOf(name);
    state.runs.forEach((run, index) => {
      if (!rows.has(run.name)) rows.set(run.name, newRow(run.name));
      const row = rows.get(run.name);
      if (body.children[index] !== row.element) body.insertBefore(row.element, body.children[index] ?? null);
      row.box.checked = shown.has(run.name);
      row.element.className = shown.has(run.name) ? "" : "unselected";
      fillRow(row, run);
    });
    byId("all").checked = shown.size === state.runs.length;
    byId("all").indeterminate = shown.size > 0 && shown.size < state.runs.length;
    byId("empty").hidden = state.runs.length > 0;
  }

  function newRow(name) {
    const box = make("input", { type: "checkbox" });
    const swatch = make("span", { className: "swatch" });
    swatch.style.background = `var(${colorOf(name)})`;
    const more = (kind) => make("span", { className: `more ${kind}` });
    const row = {
      box, warnings: more("warning"), chip: make("span", { className: "chip" }),
      doing: more("doing"), reason: more(""), steps: make("span", {}),
      bar: make("progress", { max: 1, value: 0 }), tokens: more(""),
    };
    row.cells = LABELS.map((label) => {
      const cell = make("td", {});
      cell.dataset.label = label;
      const [value, below] = [make("span", {}), more("figure")];
      cell.append(value, below);
      return { cell, value, below };
    });
    row.element = make("tr", {},
      make("td", {}, make("label", { className: "run" }, box, swatch, make("b", { title: name }, name)), row.warnings),
      make("td", {}, row.chip, row.doing, row.reason), make("td", {}, row.steps, row.bar, row.tokens), ...row.cells.map(({ cell }) => cell));
    box.addEventListener("change", () => choose(name, box.checked));
    return row;
  }

  function fillRow(row, run) {
    const text = (value, show) => (value == null ? NONE : show(value));
    const isRunning = run.status === "running";
    setText(row.chip, run.status);
    row.chip.className = `chip ${CHIPS[run.status] ?? "warn"}`;
    const beat = isRunning && run.heartbeat_seconds != null && `heartbeat ${Math.round(run.heartbeat_seconds)} s ago`;
    setText(row.doing, [run.phase, beat].filter(Boolean).join("\n"));
    setText(row.reason, run.reason ?? "");
    setText(row.warnings, run.warnings.join("; "));
    const step = run.global_step == null ? null : run.global_step + 1;
    setText(row.steps, text(step, format.whole) + (run.num_steps ? ` of ${format.whole(run.num_steps)}` : ""));
    row.bar.hidden = !run.num_steps;
    row.bar.value = run.num_steps ? Math.min(1, (step ?? 0) / run.num_steps) : 0;
    setText(row.tokens, run.tokens == null ? "" : `${format.short(run.tokens)} tokens`);
    const gib = (value) => `${value.toFixed(1)} GiB`;
    [
      text(run.train_loss, format.fixed(4)), text(run.validation_loss, format.fixed(4)),
      text(run.tokens_per_second, format.short), text(run.mfu, (mfu) => format.percent(100 * mfu)),
      text(run.memory_gib, gib), text(run.seconds, format.duration),
      text(run.seconds_left, format.duration), text(run.usd, format.dollars),
    ].forEach((value, index) => {
      setText(row.cells[index].value, value);
      row.cells[index].cell.className = value === NONE ? "none" : "";
    });
    const [left, dollars] = row.cells.slice(-2);
    setText(left.below, run.seconds_left && !exported ? `until ${format.clock(run.seconds_left)}` : "");
    setText(dollars.below, [text(run.usd_at_end, (usd) => `of about ${format.roughDollars(usd)}`),
      text(run.usd_per_hour, (usd) => `at $${usd.toFixed(2)}/h`)].filter((part) => part !== NONE).join("\n"));
  }

  // Samples.

  let samplesShown = "";

  function showSamples() {
    const runs = shownRuns().filter((run) => loaded.get(run.name)?.samples?.length);
    const shown = JSON.stringify(runs.map((run) => [run.name, run.samples]));
    byId("samples-section").hidden = !runs.length;
    if (shown === samplesShown) return;
    samplesShown = shown;
    byId("samples").replaceChildren(...runs.map((run) => {
      const [newest, ...earlier] = [...byStep(loaded.get(run.name).samples)].map(([step, samples]) => [
        make("h4", {}, `after step ${format.whole(step)}`), make("div", { className: "texts" },
          ...samples.map(({ prompt, text }) => make("pre", {}, make("b", {}, prompt), text)))]);
      const swatch = make("span", { className: "swatch" });
      swatch.style.background = `var(${colorOf(run.name)})`;
      const card = make("article", { className: "samples" }, make("h3", {}, swatch, run.name), ...newest);
      if (earlier.length) card.append(make("details", {}, make("summary", {}, "Earlier samples"), ...earlier.flat()));
      return card;
    }));
  }

  function byStep(samples) {
    const found = new Map();
    for (const sample of samples) found.set(sample.step, [...(found.get(sample.step) ?? []), sample]);
    return found;
  }

  // Following the runs.

  async function loadSeries(run) {
    const { axis } = state;
    const before = loaded.get(run.name) ?? { points: state.runs.length > 4 ? 1000 : 2000 };
    if (state.zoom && before.axis === axis && !exported) return loadDetail(run, before);
    if (before.metrics === run.metrics && before.axis === axis) return false;
    const answer = await ask("series", { run: run.name, x: axis, points: before.points });
    if (!answer || axis !== state.axis) return false;
    loaded.set(run.name, { ...before, axis, lines: answer.lines, metrics: run.metrics });
    return true;
  }

  async function loadDetail(run, before) {
    const { axis, zoom } = state;
    if (before.detail?.zoom === zoom && before.detail.metrics === run.metrics) return false;
    const [from, to] = zoom;
    const answer = await ask("series", { run: run.name, x: axis, points: before.points, from, to });
    if (!answer || zoom !== state.zoom) return false;
    loaded.set(run.name, { ...before, detail: { zoom, metrics: run.metrics, lines: answer.lines } });
    return true;
  }

  async function loadSamples(run) {
    const found = loaded.get(run.name);
    if (!found || found.samplesVersion === run.samples) return;
    const answer = await ask("samples", { run: run.name });
    if (answer) loaded.set(run.name, { ...found, samples: answer.samples, samplesVersion: run.samples });
  }

  async function update() {
    state.runs = (await ask("runs", {})).runs;
    showTable();
    const runs = shownRuns();
    let isChanged = namesOf(runs) !== drawnNames;
    for (const [index, run] of runs.entries()) {
      if (!loaded.has(run.name)) setText(byId("news"), `reading run ${index + 1} of ${runs.length}`);
      if (await loadSeries(run)) isChanged = true;
      await loadSamples(run);
    }
    if (isChanged) draw();
    showSamples();
  }

  let [isUpdating, isAskedAgain, timer] = [false, false, 0];

  async function refresh() {
    clearTimeout(timer);
    if (isUpdating) {
      isAskedAgain = true;
      return;
    }
    isUpdating = true;
    try {
      do {
        isAskedAgain = false;
        await update();
      } while (isAskedAgain);
      setText(byId("news"), exported ? `as of ${exported.exported}` : `updated ${new Date().toLocaleTimeString("en-GB")}`);
      byId("news").className = "";
    } catch (error) {
      setText(byId("news"), "no answer from lab watch; trying again");
      byId("news").className = "lost";
      if (exported || !(error instanceof TypeError)) console.error(error);
    }
    isUpdating = false;
    if (!exported) timer = setTimeout(refresh, POLL_MS);
  }

  // Choices, kept in the address so that a reload keeps them.

  function remember() {
    const choices = new URLSearchParams();
    if (state.axis !== "steps") choices.set("x", state.axis);
    if (state.log) choices.set("log", "1");
    if (state.whole) choices.set("whole", "1");
    if (state.hidden) choices.set("hide", [...state.hidden].join(","));
    history.replaceState(null, "", `#${choices}`);
  }

  function recall() {
    const choices = new URLSearchParams(location.hash.slice(1));
    if (Object.hasOwn(AXES, choices.get("x") ?? "")) state.axis = choices.get("x");
    state.log = choices.has("log");
    state.whole = choices.has("whole");
    if (choices.has("hide")) state.hidden = new Set(choices.get("hide").split(",").filter(Boolean));
    byId("log").checked = state.log;
    byId("whole").checked = state.whole;
    for (const button of document.querySelectorAll("[name=axis]")) button.checked = button.value === state.axis;
  }

  function choose(name, isShown) {
    const shown = new Set(shownRuns().map((run) => run.name));
    state.hidden = new Set(state.runs.map((run) => run.name).filter((other) => !shown.has(other)));
    if (isShown) state.hidden.delete(name);
    else state.hidden.add(name);
    changed();
  }

  function showWhole(isWhole) {
    state.whole = byId("whole").checked = isWhole;
    changed();
  }

  function changed() {
    remember();
    showTable();
    const shown = shownRuns();
    if (!shown.length || shown.some((run) => loaded.get(run.name)?.axis === state.axis)) draw();
    showSamples();
    refresh();
  }

  byId("all").addEventListener("change", (event) => {
    state.hidden = new Set(event.target.checked ? [] : state.runs.map((run) => run.name));
    changed();
  });
  for (const button of document.querySelectorAll("[name=axis]")) {
    button.addEventListener("change", () => {
      state.axis = button.value;
      state.zoom = null;
      changed();
    });
  }
  byId("log").addEventListener("change", (event) => {
    state.log = event.target.checked;
    changed();
  });
  byId("whole").addEventListener("change", (event) => showWhole(event.target.checked));
  byId("reset").addEventListener("click", () => zoom(null));
  dark.addEventListener("change", draw);
  document.addEventListener("visibilitychange", () => document.hidden || refresh());

  recall();
  refresh();
})();
