"use strict";

// The page: asks for the runs every two seconds, and for the points of those that have changed.

(() => {
  const POLL_MS = 2000;
  const PALETTE = [...Array(10).keys()].map((number) => `--run-${number}`);
  const SHOWN_AT_FIRST = 10; // runs, the most recently changed
  const CHIPS = { running: "good", finished: "", failed: "bad", "no heartbeat": "bad" };

  const byId = (id) => document.getElementById(id);
  const exported = byId("data") && JSON.parse(byId("data").textContent);
  const controls = byId("controls"); // axis, log, whole: what they show is what is drawn
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const address = new URLSearchParams(location.hash.slice(1));
  const charts = [...document.querySelectorAll(".chart")].map((card) => new Chart(card, zoomTo));

  let runs = [];
  // Names of the runs that are not drawn; null for all but the newest ones.
  let hidden = address.has("hide") ? new Set(address.get("hide").split(",")) : null;
  let zoom = null; // smallest and largest x
  let rows = new Map(); // by run: its row
  const loaded = new Map(); // by run: what was answered, and the key of its version and range
  const colors = new Map(); // by run that is drawn
  let inBits = false; // whether the tokenizers of the runs that are drawn differ: then nats per token do not compare

  async function ask(path, parameters) {
    if (exported) return path === "runs" ? exported : exported.run[parameters.run];
    const answer = await fetch(`${path}?${new URLSearchParams(parameters)}`, { headers: { "X-Token": address.get("token") } });
    if (answer.status === 404) return null; // the run was removed meanwhile
    if (!answer.ok) throw new Error(answer.status === 403 ? "open the address that lab watch has printed" : `status ${answer.status}`);
    return answer.json();
  }

  function shownRuns() {
    const newest = [...runs].sort((a, b) => b.changed - a.changed).slice(0, SHOWN_AT_FIRST);
    return runs.filter((run) => (hidden ? !hidden.has(run.name) : newest.includes(run)));
  }

  // In bits per byte of the validation text; null until its first validation.
  const bitsPerNat = (run) => (run.bytes_per_token ? 1 / (Math.LN2 * run.bytes_per_token) : null);

  // A run keeps its color while it is drawn; ten have ten colors.
  function chooseColors() {
    const names = shownRuns().map(({ name }) => name);
    for (const name of colors.keys()) if (!names.includes(name)) colors.delete(name);
    for (const name of names.filter((other) => !colors.has(other)).sort()) {
      const used = [...colors.values()];
      colors.set(name, PALETTE.find((color) => !used.includes(color)) ?? PALETTE[colors.size % PALETTE.length]);
    }
  }

  const swatch = (name) => make("span", { className: "swatch", style: `background: var(${colors.get(name) ?? "--muted"})` });

  // Draw the charts, and show the samples.
  function draw() {
    const [shown, axis] = [shownRuns(), controls.axis.value];
    const drawn = shown.filter(({ name }) => loaded.has(name)).map((run) => {
      const [{ name }, answer] = [run, loaded.get(run.name)];
      return { ...answer, name, color: cssColor(colors.get(name)), x: answer.x[axis], growths: answer.growths.map((growth) => [growth[axis], growth.n_layers]), lossScale: inBits ? bitsPerNat(run) : 1 };
    });
    const unknown = drawn.filter(({ lossScale }) => lossScale === null).map(({ name }) => name);
    byId("loss-unit").textContent = !inBits ? "nats per token"
      : `bits per byte, since the tokenizers differ${unknown.length ? `; not yet known of ${unknown.join(", ")}` : ""}`;
    const [low, high] = extremes(drawn.flatMap(({ x }) => x.filter((value) => value != null)));
    const range = zoom ?? (low === high ? [low - 1, high + 1] : [low, high]);
    const view = { axis, range, isZoomed: Boolean(zoom), log: controls.log.checked, whole: controls.whole.checked, theme: dark.matches, inBits };
    for (const chart of charts) chart.show(drawn, view);
    byId("reset").hidden = !zoom;
    byId("nothing").hidden = !runs.length || low <= high || (shown.length > 0 && !drawn.length);
    byId("nothing").textContent = !shown.length ? "No run is selected: select one in the table."
      : axis === "dollars" ? "These runs have no price: set usd_per_hour." : "These runs have no records yet.";
    showSamples();
  }

  // A range, or null for all of x; again, for all losses.
  function zoomTo(range) {
    if (!range && !zoom) controls.whole.checked = !controls.whole.checked;
    zoom = range;
    changed();
  }

  // The table. Of each column after the first one: its label, a value, and what is below.

  const clock = (seconds) => new Date(Date.now() + 1000 * seconds).toLocaleString(
    "en-GB", { hour: "2-digit", minute: "2-digit", ...(seconds > 12 * 3600 && { weekday: "short", day: "numeric" }) });
  const text = (value, show) => (value == null ? "" : show(value));

  // The last loss less that of the reference after as many tokens, and the tokens that it is ahead.
  const signed = (value, show) => (value < 0 ? "" : "+") + show(value);
  const compared = (run, found) => found && `${signed(found.loss, format.four)} to ${run.reference}`
    + text(found.tokens, (share) => `, ${signed(share * 100, format.percent)} tokens`);

  // What stands below the value of a figure, by its key.
  const BELOW = {
    train_loss: (run) => [compared(run, run.train_compared)],
    validation_loss: (run) => [compared(run, run.validation_compared),
      inBits && bitsPerNat(run) && text(run.validation_loss, (nats) => `${format.four(nats * bitsPerNat(run))} bits per byte`)],
    seconds_left: (run) => [run.seconds_left && !exported && `until ${clock(run.seconds_left)}`],
    usd: (run) => [text(run.usd_at_end, (usd) => `of about ${format.dollars(usd)}`), text(run.usd_per_hour, (usd) => `at $${usd.toFixed(2)}/h`)],
  };
  const OWN_COLUMNS = {
    Status: (run) => [make("span", { className: `chip ${CHIPS[run.status] ?? "warn"}` }, run.status),
      run.phase, run.status === "running" && text(run.heartbeat_seconds, (age) => `heartbeat ${Math.round(age)} s ago`), run.reason],
    Steps: (run) => [text(run.global_step, (step) => format.whole(step + 1)) + text(run.num_steps, (number) => ` of ${format.whole(number)}`),
      text(run.tokens, (number) => `${format.short(number)} tokens`)],
  };
  // By heading what a cell shows: a value, and what is below. The figures are those of lab/columns.py.
  let columns = {};
  function useFigures(figures) {
    if (Object.keys(columns).length) return;
    const shown = figures.map(({ key, heading, unit }) => [heading[0].toUpperCase() + heading.slice(1), (run) => [text(run[key], byUnit[unit]), ...(BELOW[key]?.(run) ?? [])]]);
    columns = { ...OWN_COLUMNS, ...Object.fromEntries(shown) };
    for (const heading of Object.keys(columns)) {
      byId("runs").tHead.rows[0].append(make("th", { scope: "col", className: heading === "Steps" ? "wide" : "" }, heading));
    }
  }

  function showTable() {
    chooseColors();
    const [shown, body] = [shownRuns(), byId("runs").tBodies[0]];
    inBits = new Set(shown.map(({ tokenizer }) => tokenizer).filter(Boolean)).size > 1;
    rows = new Map(runs.map(({ name }) => [name, rows.get(name) ?? newRow(name)]));
    const elements = [...rows.values()];
    if (elements.length !== body.rows.length || elements.some((row, index) => row !== body.rows[index])) body.replaceChildren(...elements);
    for (const run of runs) fillRow(rows.get(run.name), run, shown.includes(run));
    byId("all").checked = shown.length === runs.length;
    byId("all").indeterminate = shown.length > 0 && shown.length < runs.length;
    byId("empty").hidden = runs.length > 0;
  }

  function newRow(name) {
    const box = make("input", { type: "checkbox" });
    box.addEventListener("change", () => select([name], box.checked));
    const label = make("label", { className: "run" }, box, swatch(name), make("b", { title: name }, name));
    return make("tr", {}, make("td", {}, label, make("span", { className: "more warning" })));
  }

  // The first cell stays, with the box that may have the focus.
  function fillRow(row, run, isShown) {
    row.className = isShown ? "" : "unselected";
    row.querySelector("input").checked = isShown;
    row.querySelector(".swatch").replaceWith(swatch(run.name));
    row.querySelector(".warning").textContent = run.warnings.join("; ");
    while (row.cells.length > 1) row.deleteCell(-1);
    for (const [label, show] of Object.entries(columns)) {
      const [value, ...more] = show(run);
      const cell = make("td", { className: value === "" ? "none" : "" }, value || NONE);
      cell.dataset.label = label;
      if (label === "Steps" && run.num_steps) cell.append(make("progress", { max: run.num_steps, value: (run.global_step ?? -1) + 1 }));
      cell.append(make("span", { className: "more" }, more.filter(Boolean).join("\n")));
      row.append(cell);
    }
  }

  function showSamples() {
    const cards = shownRuns().filter(({ name }) => loaded.get(name)?.samples.length).map(({ name }) => {
      const [newest, ...earlier] = [...Map.groupBy(loaded.get(name).samples, ({ step }) => step)].map(([step, samples]) => [
        make("h4", {}, `after step ${format.whole(step)}`), make("div", { className: "texts" },
          ...samples.map((sample) => make("pre", {}, make("b", {}, sample.prompt), sample.text)))]);
      const card = make("article", { className: "samples" }, make("h3", {}, swatch(name), name), ...newest);
      if (earlier.length) card.append(make("details", {}, make("summary", {}, "Earlier samples"), ...earlier.flat()));
      return card;
    });
    byId("samples-section").hidden = !cards.length;
    byId("samples").replaceChildren(...cards);
  }

  let [drawnKey, updates, timer] = ["", Promise.resolve(), 0];

  async function update() {
    const answer = await ask("runs", {});
    runs = answer.runs;
    useFigures(answer.columns);
    showTable();
    const shown = shownRuns();
    for (const [index, { name, version }] of shown.entries()) {
      const key = `${version} ${zoom}`;
      if (loaded.get(name)?.key === key) continue;
      if (!loaded.has(name)) byId("news").textContent = `reading run ${index + 1} of ${shown.length}`;
      const points = await ask("run", { run: name, ...(zoom && { x: controls.axis.value, from: zoom[0], to: zoom[1] }) });
      if (points) loaded.set(name, { ...points, key });
    }
    const key = JSON.stringify(shown.map(({ name }) => [name, loaded.get(name)?.key]));
    if (key !== drawnKey) draw();
    drawnKey = key;
  }

  function refresh() {
    updates = updates.then(update).then(() => ({
      textContent: exported ? `as of ${exported.exported}` : `updated ${new Date().toLocaleTimeString("en-GB")}`, className: "",
    }), (error) => ({ // a TypeError: fetch has no connection
      textContent: error instanceof TypeError ? "no answer from lab watch; trying again" : error.message, className: "lost",
    })).then((news) => {
      Object.assign(byId("news"), news);
      clearTimeout(timer);
      if (!exported) timer = setTimeout(refresh, POLL_MS);
    });
  }

  // Choices are kept in the address, so that a reload keeps them.

  function changed() {
    const choices = new URLSearchParams(new FormData(controls));
    if (address.has("token")) choices.set("token", address.get("token"));
    if (hidden) choices.set("hide", [...hidden].join(","));
    history.replaceState(null, "", `#${choices}`);
    showTable();
    draw();
    refresh();
  }

  function select(names, isShown) {
    const shown = shownRuns();
    hidden = new Set(runs.filter((run) => !shown.includes(run)).map(({ name }) => name));
    for (const name of names) isShown ? hidden.delete(name) : hidden.add(name);
    changed();
  }

  if (Object.hasOwn(AXES, address.get("axis") ?? "")) controls.axis.value = address.get("axis");
  for (const name of ["log", "whole"]) controls[name].checked = address.has(name);
  byId("all").addEventListener("change", ({ target }) => select(runs.map(({ name }) => name), target.checked));
  controls.addEventListener("change", ({ target }) => {
    if (target.name === "axis") zoom = null;
    changed();
  });
  byId("reset").addEventListener("click", () => zoomTo(null));
  dark.addEventListener("change", draw);
  document.addEventListener("visibilitychange", () => document.hidden || refresh());
  addEventListener("hashchange", () => location.reload()); // another address of lab watch
  refresh();
})();
