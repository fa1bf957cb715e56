"use strict";

// Numbers as text, and charts of runs. Text of runs reaches the page by textContent only.

const NONE = "–";
const compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });
const currency = new Intl.NumberFormat("en-US", { style: "currency", currency: "USD" });

const format = {
  three: (value) => String(Number(value.toPrecision(3))),
  one: (value) => value.toFixed(1),
  four: (value) => value.toFixed(4),
  whole: (value) => Math.round(value).toLocaleString("en-US"),
  percent: (value) => `${value.toFixed(1)}%`,
  short: (value) => (Math.abs(value) < 1000 ? format.three(value) : compact.format(value).replace("K", "k")),
  dollars: (value) => (value > 0 && value < 1 ? `$${value.toFixed(4)}` : currency.format(value)),
  duration(seconds) {
    const [whole, two] = [Math.round(seconds), (number) => String(number).padStart(2, "0")];
    return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
  },
};

// How a table shows a figure, by its unit: those of FORMATS in lab/columns.py that the page has.
const byUnit = {
  "nats per token": format.four, "tokens/s": format.short, tokens: format.short, count: format.whole, seconds: format.duration,
  fraction: (share) => format.percent(100 * share), GiB: (gib) => `${format.one(gib)} GiB`, US$: format.dollars,
};

// Ticks of one axis in one form: the unit of the largest, so 500 beside 1,000 is 0.5k.
function ticksOf(values) {
  const largest = Math.max(...values.map((value) => Math.abs(value ?? 0)));
  const [size, letter] = [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"], [1, ""]].find(([least]) => largest >= least) ?? [1, ""];
  return values.map((value) => (value == null ? null : value === 0 ? "0" : `${format.three(value / size)}${letter}`));
}

const AXES = {
  steps: { ticks: ticksOf, value: (x) => `step ${format.whole(x)}` },
  tokens: { ticks: ticksOf, value: (x) => `${format.short(x)} tokens` },
  time: {
    ticks: (values) => values.map(format.duration), value: format.duration,
    distances: [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000],
  },
  dollars: { ticks: (values) => values.map((x) => `$${format.three(x)}`), value: format.dollars },
};
const NAMES = { // of the lines in one chart
  train_loss: " training", validation_loss: " validation",
  train_reference_loss: " reference, training", validation_reference_loss: " reference, validation",
};
const DASHES = [[8, 4], [2, 3], [12, 3, 2, 3], [4, 8], [12, 6]]; // of the validation sets after the first one
const REFERENCE_DASH = [5, 4];

function make(tag, properties, ...children) {
  const element = document.createElement(tag);
  Object.assign(element, properties);
  element.append(...children); // strings become text
  return element;
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

// Smallest and largest of numbers; [Infinity, -Infinity] if there are none.
const extremes = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

// An article of page.html, whose data attributes say what it shows:
// keys: of its lines. format: of its values. log: its y axis may be logarithmic. falls: its first
// values are so large that they would flatten the others. zero: its y axis begins at 0. whole: its
// ticks are whole numbers. scale: by which values are multiplied. loss: its scale is that of the run.
// sets: only of runs whose validation sets have names. A key also stands for those of sets: KEY/NAME.
class Chart {
  // onZoom is called with [smallest, largest] of a selected range, and with null for all.
  constructor(card, onZoom) {
    Object.assign(this, { card, onZoom, spec: card.dataset, drawn: "", place: make("div", { className: "plot" }) });
    card.append(this.place);
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.place);
  }

  size() {
    const height = this.card.classList.contains("large") ? (innerWidth < 800 ? 260 : 340) : 190;
    return { width: Math.max(200, Math.floor(this.place.clientWidth)), height };
  }

  // runs: name, color, x, lines, is_long, growths ([x, number of layers]), lossScale (null if not known). view: axis, log, whole (the
  // y range too), isZoomed, range (of x), theme, inBits.
  show(runs, view) {
    this.view = view;
    this.isLog = view.log && "log" in this.spec;
    const found = runs.map((run) => [run, this.seriesOf(run, runs.length === 1)]).filter(([, series]) => series.length);
    this.series = found.flatMap(([, series]) => series);
    this.growths = found.flatMap(([{ growths, color }]) => growths.map(([x, layers]) => ({ x, layers, color })));
    this.card.hidden = !found.length;
    const drawn = JSON.stringify([this.series.map(({ label, color, isEdge, isFew, dash }) => [label, color, isEdge, isFew, dash]), { ...view, range: null }]);
    const tables = found.map(([{ x }, series]) => {
      const first = x.findIndex((value) => value != null);
      return [x, ...series.map(({ y }) => y)].map((values) => values.slice(first));
    });
    // Without the nulls: one of a point that another run has too would take its place.
    const data = found.length && uPlot.join(tables, tables.map((table) => table.map(() => 0)));
    if (this.plot && this.drawn === drawn) return this.plot.setData(data);
    this.plot?.destroy();
    [this.plot, this.drawn] = [null, drawn];
    if (found.length) this.plot = new uPlot(this.options(), data, this.place);
  }

  // Each line of a run, after the edges of its band: what a report, GPUs or a point have as extremes.
  seriesOf(run, isAlone) {
    const scale = "loss" in this.spec ? run.lossScale : Number(this.spec.scale ?? 1);
    if (scale === null) return [];
    if ("sets" in this.spec && !run.lines.validation_perplexity) return [];
    const keys = this.spec.keys.split(" ").flatMap((key) => [key, ...Object.keys(run.lines).filter((other) => other.startsWith(`${key}/`))]);
    return keys.filter((key) => run.lines[key]).flatMap((key, index) => {
      const [metric, set] = key.split("/");
      // The tokens of another set have another length.
      const isInBits = set && "loss" in this.spec && this.view.inBits;
      const shownKey = isInBits ? key.replace("loss", "bits_per_byte") : key;
      if (!run.lines[shownKey]) return [];
      const shown = (values) => values.map((y, point) => (
        y == null || run.x[point] == null || (this.isLog && y <= 0) ? null : y * (isInBits ? 1 : scale)));
      const { y, low, high } = run.lines[shownKey];
      const isStrong = metric === "validation_loss";
      const isReference = metric.endsWith("_reference_loss");
      const dash = isReference ? REFERENCE_DASH : set && DASHES[index % DASHES.length];
      const name = set ? ` ${set}` : "sets" in this.spec ? " validation" : NAMES[key] ?? "";
      const line = { label: run.name + name, color: run.color, isStrong, isReference, dash, x: run.x, y: shown(y) };
      const numPoints = line.y.filter((value) => value != null).length;
      if (!numPoints) return [];
      line.isFew = numPoints < (isStrong ? 200 : 3);
      const edges = low && (isAlone || run.is_long) ? [high, low] : [];
      return [...edges.map((edge) => ({ ...line, y: shown(edge), isEdge: true })), line];
    });
  }

  options() {
    const axis = AXES[this.view.axis];
    const common = { stroke: cssColor("--muted"), font: "11px system-ui, sans-serif", grid: { stroke: cssColor("--grid"), width: 1 }, ticks: { show: false } };
    return {
      ...this.size(), padding: [8, 24, 0, 0], legend: { markers: { width: 1 } },
      scales: {
        x: { time: false, range: () => this.view.range },
        y: { distr: this.isLog ? 3 : 1, range: (_, low, high) => this.range(low, high) },
      },
      axes: [
        { ...common, size: 26, gap: 4, space: 64, ...(axis.distances && { incrs: axis.distances }),
          values: (_, ticks) => axis.ticks(ticks) },
        { ...common, gap: 4, space: 28, ...("whole" in this.spec && { incrs: [1, 2, 5, 10, 20] }),
          size: (_, texts) => 14 + 6.5 * Math.max(3, ...(texts ?? []).map((tick) => tick?.length ?? 0)),
          values: (_, ticks) => ticksOf(ticks) },
      ],
      series: [{ label: "", value: (_, x) => (x == null ? "" : axis.value(x)) }, ...this.series.map((line) => this.seriesOptions(line))],
      bands: this.series.flatMap(({ isEdge, color }, index) => (
        isEdge && this.series[index + 1].isEdge ? [{ series: [index + 1, index + 2], fill: `${color}22` }] : [])),
      cursor: {
        y: false, drag: { x: true, y: false, setScale: false },
        sync: { key: "runs", scales: ["x", null], filters: { pub: (type) => !["mousedown", "mouseup"].includes(type) } },
        dataIdx: (plot, series, index) => (series ? nearest(plot.data[series], index) : index),
        points: { size: 6 },
        bind: { dblclick: () => () => this.onZoom(null) },
      },
      hooks: { setSelect: [(plot) => this.select(plot)], draw: [(plot) => this.drawGrowths(plot)] },
    };
  }

  // The legend has the value under the mouse, else the last one.
  seriesOptions({ label, color, isEdge, isStrong, isReference, isFew, dash }) {
    if (isEdge) return { class: "edge", stroke: "transparent", width: 1, spanGaps: true, points: { show: false } };
    return {
      label, class: isStrong ? "strong" : "line", stroke: color, width: isStrong ? 2.25 : 1.25, dash, spanGaps: true,
      points: { show: isFew && !isReference, size: 6, width: 1, fill: color },
      value: (plot, _, index, at) => {
        const values = plot.data[index];
        const value = values[nearest(values, at ?? values.length - 1)];
        return value == null ? NONE : format[this.spec.format](value);
      },
    };
  }

  // A vertical line where the model of a run got its other layers, with their number.
  drawGrowths({ ctx, bbox, valToPos }) {
    ctx.save();
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textBaseline = "top";
    for (const [index, { x, layers, color }] of this.growths.entries()) {
      const left = x == null ? NaN : valToPos(x, "x", true);
      if (!(left >= bbox.left && left <= bbox.left + bbox.width)) continue;
      [ctx.strokeStyle, ctx.fillStyle] = [color, color];
      ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
      const [text, gap] = [`${layers} layers`, 4 * devicePixelRatio];
      const fits = left + gap + ctx.measureText(text).width <= bbox.left + bbox.width;
      ctx.textAlign = fits ? "left" : "right";
      ctx.fillText(text, fits ? left + gap : left - gap, bbox.top + 12 * devicePixelRatio * index); // one below the other
    }
    ctx.restore();
  }

  select(plot) {
    const { left, width } = plot.select;
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (width >= 5) this.onZoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  }

  range(low, high) {
    if (low == null) return [0.1, 1];
    if (this.isLog) return uPlot.rangeLog(low, high, 10, false);
    if ("zero" in this.spec) return [0, high > 0 ? high * 1.08 : 1];
    if ("falls" in this.spec && !this.view.isZoomed && !this.view.whole) { // after the first tenth of each run
      [low, high] = extremes(this.series.filter(({ isEdge }) => !isEdge).flatMap(({ x, y }) => {
        const first = x[0] + (x[x.length - 1] - x[0]) / 10;
        return y.filter((value, index) => value != null && x[index] >= first);
      }));
    }
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  }
}
