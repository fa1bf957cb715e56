"use strict";

// Numbers as text, and charts of runs. Text of runs reaches the page by textContent only.

const NONE = "–";

const format = {
  plain: (value) => String(Number(value.toPrecision(4))),
  three: (value) => String(Number(value.toPrecision(3))),
  fixed: (digits) => (value) => value.toFixed(digits),
  whole: (value) => Math.round(value).toLocaleString("en-US"),
  percent: (value) => `${value.toFixed(1)}%`,
  dollars(value) {
    const digits = value > 0 && value < 1 ? 4 : 2;
    return `$${value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })}`;
  },
  roughDollars: (value) => (value < 10 ? format.dollars(value) : `$${format.whole(value)}`),
  short(value) {
    for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (Math.abs(value) >= size) return format.three(value / size) + letter;
    }
    return format.three(value);
  },
  duration(seconds) {
    const whole = Math.round(seconds);
    const two = (number) => String(number).padStart(2, "0");
    return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
  },
  clock(seconds) { // of a moment in so many seconds, with the day unless it is today
    const [now, then] = [new Date(), new Date(Date.now() + 1000 * seconds)];
    const day = now.toDateString() === then.toDateString() ? {} : { weekday: "short", day: "numeric", month: "short" };
    return then.toLocaleString("en-GB", { ...day, hour: "2-digit", minute: "2-digit" });
  },
};

const AXES = {
  steps: { tick: format.short, value: (x) => `step ${format.whole(x)}` },
  tokens: { tick: format.short, value: (x) => `${format.short(x)} tokens` },
  time: {
    tick: format.duration, value: format.duration,
    steps: [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200,
      86400, 172800, 432000, 864000],
  },
  dollars: { tick: (x) => `$${format.three(x)}`, value: format.dollars },
};

const gpu = (key) => [{ key, low: `${key}_min`, high: `${key}_max` }];

const TRAINING_CHARTS = [
  {
    title: "Loss", unit: "nats per token", large: true, log: true, falls: true, value: format.fixed(4),
    lines: [
      { key: "train_loss", name: "training", low: "train_loss_min", high: "train_loss_max" },
      { key: "validation_loss", name: "validation", strong: true },
    ],
  },
  { title: "Learning rate", value: format.three, lines: [{ key: "learning_rate" }] },
  {
    title: "Gradient norm", log: true, value: format.three,
    lines: [{ key: "grad_norm", low: "grad_norm", high: "grad_norm_max" }],
  },
  { title: "Tokens a second", value: format.short, zero: true, lines: [{ key: "tokens_per_second" }] },
  { title: "Slowest step", unit: "seconds, of each report", value: format.three, zero: true, lines: [{ key: "slowest_step_seconds" }] },
  { title: "MFU", unit: "% of the peak", scale: 100, value: format.percent, zero: true, lines: [{ key: "mfu" }] },
  { title: "Dollars", value: format.dollars, zero: true, lines: [{ key: "usd" }] },
];

const MACHINE_CHARTS = [
  { title: "GPU memory", unit: "GiB", value: format.fixed(1), zero: true, lines: gpu("gpu_memory_gib") },
  { title: "GPU use", unit: "%", value: format.fixed(0), zero: true, lines: gpu("gpu_use_percent") },
  { title: "GPU temperature", unit: "°C", value: format.fixed(0), lines: gpu("gpu_temperature_c") },
  { title: "GPU power", unit: "W", value: format.fixed(0), zero: true, lines: gpu("gpu_power_w") },
  { title: "GPUs slowed down", unit: "by heat or power supply", value: format.fixed(0), zero: true, steps: [1, 2, 5, 10, 20], lines: [{ key: "gpus_slowed_down" }] },
  { title: "Energy", unit: "kWh", value: format.three, zero: true, lines: [{ key: "energy_kwh" }] },
  { title: "Memory of the machine", unit: "GiB in use", value: format.fixed(1), zero: true, lines: [{ key: "host_ram_gib" }] },
  { title: "Load of the machine", unit: "mean over a minute", value: format.fixed(1), zero: true, lines: [{ key: "host_load" }] },
  { title: "Free disk space", unit: "GiB", value: format.fixed(1), zero: true, lines: [{ key: "disk_free_gib" }] },
];

function make(tag, properties, ...children) {
  const element = document.createElement(tag);
  Object.assign(element, properties);
  element.append(...children); // strings become text
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const cssColor = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Index of the value next to `index` that there is: lines of several runs share one x array.
function nearest(values, index) {
  for (let far = 0; far < values.length; far++) {
    if (values[index - far] != null) return index - far;
    if (values[index + far] != null) return index + far;
  }
  return index;
}

class Chart {
  // onZoom is called with [smallest, largest] of a selected range, and with null for all.
  constructor(spec, parent, onZoom) {
    Object.assign(this, { spec, onZoom, plot: null, drawn: "" });
    this.legend = make("ul", { className: "legend" });
    this.place = make("div", { className: "plot" });
    this.at = make("small", { className: "at" });
    const title = make("h3", {}, this.at, spec.title);
    if (spec.unit) title.append(make("small", {}, spec.unit));
    this.card = make("article", { className: spec.large ? "chart large" : "chart", hidden: true },
      title, this.legend, this.place);
    parent.append(this.card);
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.place);
  }

  size() {
    const narrow = innerWidth < 800;
    const height = this.spec.large ? (narrow ? 260 : 340) : 190;
    return { width: Math.max(200, Math.floor(this.place.clientWidth)), height };
  }

  // view: axis, log, whole (the y range too), range ([smallest, largest] x of all charts), isZoomed, theme.
  show(runs, view) {
    this.view = view;
    const lines = runs.flatMap((run) => this.linesOf(run, runs.length === 1));
    this.card.hidden = !lines.some((line) => !line.isEdge);
    if (this.card.hidden) return this.remove();
    this.lines = lines;
    const data = uPlot.join(lines.map((line) => [line.x, line.y]));
    const drawn = JSON.stringify([lines.map((line) => [line.run, line.key, line.color, line.y.length < 200]),
      view.axis, view.log, view.whole, view.theme]);
    if (this.plot && drawn === this.drawn) {
      this.plot.setData(data, true);
    } else {
      this.remove();
      this.drawn = drawn;
      this.fillLegend();
      this.plot = new uPlot(this.options(), data, this.place);
      this.followTouch(this.plot);
    }
    this.showValues();
  }

  // A finger that moves sideways shows the values under it; uPlot follows a mouse only.
  followTouch(plot) {
    const follow = (event) => {
      if (event.pointerType !== "touch") return;
      const { left, top } = plot.over.getBoundingClientRect();
      plot.setCursor({ left: event.clientX - left, top: event.clientY - top }, true, true);
    };
    plot.over.addEventListener("pointerdown", follow);
    plot.over.addEventListener("pointermove", follow);
  }

  remove() {
    this.plot?.destroy();
    this.plot = null;
    this.drawn = "";
  }

  linesOf(run, isAlone) {
    const found = [];
    for (const line of this.spec.lines) {
      const points = run.lines[line.key];
      if (!points?.x.length) continue;
      const hasOwn = isAlone && run.lines[line.high] && run.lines[line.low];
      const [low, high] = hasOwn ? [run.lines[line.low], run.lines[line.high]] : [points, points];
      const add = ({ x }, y, isEdge) => found.push({
        run: run.name, color: run.color, key: line.key, isEdge, name: line.name, strong: line.strong,
        x, y: this.shown(y), isFaint: !isAlone,
      });
      if (hasOwn || points.low) { // a band: the extremes of reports, of GPUs, or of values drawn as one point
        add(high, high.high ?? high.y, true);
        add(low, low.low ?? low.y, true);
      }
      add(points, points.y, false);
    }
    return found;
  }

  shown(values) {
    const scale = this.spec.scale ?? 1;
    if (this.view.log && this.spec.log) return values.map((y) => (y > 0 ? y * scale : null));
    return scale === 1 ? values : values.map((y) => y * scale);
  }

  fillLegend() {
    this.values = [];
    this.legend.replaceChildren(...this.lines.filter((line) => !line.isEdge).map((line) => {
      const mark = make("span", { className: line.strong ? "mark dots" : "mark" });
      mark.style[line.strong ? "background" : "borderColor"] = line.color;
      const value = make("b", {});
      this.values.push([this.lines.indexOf(line) + 1, value]);
      const name = [line.run, line.name].filter(Boolean).join(" ");
      return make("li", { title: name }, mark, make("span", { className: "name" }, name), value);
    }));
  }

  showValues() {
    if (!this.plot) return;
    const { data, cursor } = this.plot;
    const isOver = cursor.left >= 0 && cursor.idx != null;
    setText(this.at, isOver ? AXES[this.view.axis].value(data[0][cursor.idx]) : "");
    for (const [index, element] of this.values) {
      const values = data[index];
      const at = nearest(values, isOver ? cursor.idx : values.length - 1);
      setText(element, values[at] == null ? NONE : this.spec.value(values[at]));
    }
  }

  options() {
    const { axis, log } = this.view;
    const [text, grid] = [cssColor("--muted"), cssColor("--grid")];
    const common = { stroke: text, font: "11px system-ui, sans-serif", grid: { stroke: grid, width: 1 }, ticks: { show: false } };
    const isLog = Boolean(log && this.spec.log);
    const edges = this.lines.flatMap((line, index) => (line.isEdge && this.lines[index + 1]?.isEdge ? [index + 1] : []));
    return {
      ...this.size(), legend: { show: false }, padding: [8, 24, 0, 0],
      scales: {
        x: { time: false, range: () => this.view.range },
        y: { distr: isLog ? 3 : 1, range: (_, low, high) => this.range(low, high, isLog) },
      },
      axes: [
        { ...common, size: 26, gap: 4, space: 64, ...(AXES[axis].steps && { incrs: AXES[axis].steps }),
          values: (_, ticks) => ticks.map((x) => AXES[axis].tick(x)) },
        { ...common, gap: 4, space: 28, ...(this.spec.steps && { incrs: this.spec.steps }),
          size: (_, texts) => 14 + 6.5 * Math.max(3, ...(texts ?? []).map((tick) => tick?.length ?? 0)),
          values: (_, ticks) => ticks.map((y) => (y == null ? null : format.short(y))) },
      ],
      series: [{}, ...this.lines.map((line) => this.series(line))],
      bands: edges.map((index) => ({ series: [index, index + 1], fill: this.lines[index - 1].color + (this.lines[index - 1].isFaint ? "1f" : "26") })),
      cursor: {
        y: false, drag: { x: true, y: false, setScale: false },
        sync: { key: "runs", scales: ["x", null], filters: { pub: (type) => !["mousedown", "mouseup"].includes(type) } },
        dataIdx: (plot, series, index) => (series ? nearest(plot.data[series], index) : index),
        points: { size: 6 },
        bind: { dblclick: () => () => this.onZoom(null) },
      },
      hooks: {
        setCursor: [() => this.showValues()],
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (width < 5) return;
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          this.onZoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
        }],
      },
    };
  }

  // The y range: from and to a tick of a log scale, else with some room.
  range(low, high, isLog) {
    if (low == null) return isLog ? [1, 10] : [0, 1];
    if (isLog) {
      const [below, above] = [low, high].map((y) => 10 ** Math.floor(Math.log10(y)));
      const top = Math.ceil(high / above) * above;
      return [Math.floor(low / below) * below, top > low ? top : 2 * top];
    }
    if (this.spec.zero) return [0, high > 0 ? high * 1.08 : 1];
    if (this.isCut()) [low, high] = this.lateRange() ?? [low, high];
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  }

  // Whether the y range is that of late values, so that the first ones do not flatten the others.
  isCut() {
    return Boolean(this.spec.falls && !this.view.isZoomed && !this.view.whole);
  }

  // Smallest and largest value after the first tenth of each run.
  lateRange() {
    const [ends, lines] = [new Map(), this.lines.filter((line) => !line.isEdge)];
    for (const { run, x } of lines) {
      const [first, last] = ends.get(run) ?? [Infinity, -Infinity];
      ends.set(run, [Math.min(first, x[0]), Math.max(last, x[x.length - 1])]);
    }
    const found = lines.flatMap(({ run, x, y }) => {
      const [first, last] = ends.get(run);
      return y.filter((_, index) => x[index] >= first + (last - first) / 10);
    });
    const [low, high] = found.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
    return low <= high ? [low, high] : null;
  }

  series(line) {
    if (line.isEdge) return { stroke: "transparent", width: 1, spanGaps: true, points: { show: false } };
    const isFew = line.y.length < (line.strong ? 200 : 3);
    return {
      stroke: line.color, width: line.strong ? 2.25 : 1.25, spanGaps: true,
      points: { show: isFew, size: 6, width: 1, fill: line.color },
    };
  }
}
