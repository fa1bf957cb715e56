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

  const state = { axis: "steps", log: false, only: null, zoom: null, runs: [] };
  const loaded = new Map(); // by run: axis, points, metrics, version, lines, samples
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
    const shown = state.only ?? newestRuns();
    return state.runs.filter((run) => shown.has(run.name));
  }

  function colorOf(name) {
    if (!colors.has(name)) colors.set(name, colors.size % NUM_COLORS);
    return `--run-${colors.get(name)}`;
  }

  function draw() {
    const runs = shownRuns().filter((run) => loaded.get(run.name)?.axis === state.axis)
      .map((run) => ({ name: run.name, color: cssColor(colorOf(run.name)), lines: loaded.get(run.name).lines }));
    const view = { axis: state.axis, log: state.log, theme: dark.matches, range: state.zoom ?? wholeRange(runs) };
    for (const chart of charts) chart.show(runs, view);
    byId("machine-section").hidden = !byId("machine").querySelector(".chart:not([hidden])");
    byId("reset").hidden = !state.zoom;
    const isEmpty = runs.length > 0 && !document.querySelector(".chart:not([hidden])");
    setText(byId("nothing"), !isEmpty ? "" : state.axis === "dollars"
      ? "These runs have no price: set usd_per_hour." : "These runs have no records yet.");
    byId("nothing").hidden = !isEmpty;
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

  function zoom(range) {
    state.zoom = range;
    draw();
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
      return cell;
    });
    row.element = make("tr", {},
      make("td", {}, make("label", { className: "run" }, box, swatch, make("b", { title: name }, name)), row.warnings),
      make("td", {}, row.chip, row.doing, row.reason), make("td", {}, row.steps, row.bar, row.tokens), ...row.cells);
    box.addEventListener("change", () => choose(name, box.checked));
    return row;
  }

  function fillRow(row, run) {
    const text = (value, show) => (value == null ? NONE : show(value));
    const isRunning = run.status === "running";
    setText(row.chip, run.status);
    row.chip.className = `chip ${CHIPS[run.status] ?? "warn"}`;
    const beat = isRunning && run.heartbeat_seconds != null && `heartbeat ${format.duration(run.heartbeat_seconds)} ago`;
    setText(row.doing, [run.phase, beat].filter(Boolean).join(" · "));
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
      setText(row.cells[index], value);
      row.cells[index].className = value === NONE ? "none" : "";
    });
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
    if (before.metrics === run.metrics && before.axis === axis) return false;
    const since = before.axis === axis ? before.version : "";
    const answer = await ask("series", { run: run.name, x: axis, points: before.points, since });
    if (!answer || axis !== state.axis) return false;
    const lines = {};
    for (const [key, { keep, x, y }] of Object.entries(answer.lines)) {
      const old = keep ? before.lines[key] : { x: [], y: [] };
      lines[key] = { x: old.x.slice(0, keep).concat(x), y: old.y.slice(0, keep).concat(y) };
    }
    loaded.set(run.name, { ...before, axis, lines, version: answer.version, metrics: run.metrics });
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
    for (const run of shownRuns()) {
      if (await loadSeries(run)) draw();
      await loadSamples(run);
    }
    draw();
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
    if (state.only) choices.set("only", [...state.only].join(","));
    history.replaceState(null, "", `#${choices}`);
  }

  function recall() {
    const choices = new URLSearchParams(location.hash.slice(1));
    if (Object.hasOwn(AXES, choices.get("x") ?? "")) state.axis = choices.get("x");
    state.log = choices.has("log");
    if (choices.has("only")) state.only = new Set(choices.get("only").split(",").filter(Boolean));
    byId("log").checked = state.log;
    for (const button of document.querySelectorAll("[name=axis]")) button.checked = button.value === state.axis;
  }

  function choose(name, isShown) {
    state.only = new Set(shownRuns().map((run) => run.name));
    if (isShown) state.only.add(name);
    else state.only.delete(name);
    changed();
  }

  function changed() {
    remember();
    showTable();
    draw();
    showSamples();
    refresh();
  }

  byId("all").addEventListener("change", (event) => {
    state.only = new Set(event.target.checked ? state.runs.map((run) => run.name) : []);
    if (event.target.checked && state.runs.length <= SHOWN_AT_FIRST) state.only = null; // new runs too
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
  byId("reset").addEventListener("click", () => zoom(null));
  dark.addEventListener("change", draw);
  document.addEventListener("visibilitychange", () => document.hidden || refresh());

  recall();
  refresh();
})();
