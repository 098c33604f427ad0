// Charts with a shared cursor, drawn by uPlot. A chart is {id, title, unit, lines, x, columns}, as
// charts.py computes it from charts.toml; x are training steps, and columns has the values of one
// line each. Lines of kind "axis" are other choices for the x axis.
"use strict";

const Charts = (() => {
  const COLORS = ["blue", "amber", "teal", "rose", "violet", "slate"];
  const STACKED = ["soft-blue", "soft-amber", "slate", "soft-teal", "faint"];
  const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3], [1, 6]];
  const STROKES = ["", "dashed", "dotted", "dashed", "dotted"]; // legend style of each of DASHES
  const HEIGHT = 190;
  const AXES = { step: null, time: "total/seconds", tokens: "total/tokens" }; // name -> key of its line
  const BAD = new Set(["leave", "killed", "skip", "roll_back", "publish_failed",
    "checkpoint_failed", "journal_failed"]);
  const panels = new Map(); // by chart id
  let grid, markers = [], axis = "step";

  // Format a number for legends and axes.
  function format(value, percent) {
    if (value === null || value === undefined) return "-";
    if (percent) return (100 * value).toFixed(value && Math.abs(value) < 0.01 ? 1 : 0) + "%";
    const size = Math.abs(value);
    if (size >= 1000) return Math.round(value).toLocaleString("en-US");
    if (size >= 100) return value.toFixed(0);
    if (size !== 0 && size < 0.001) return value.toExponential(1);
    return String(Number(value.toPrecision(3)));
  }

  function formatX(value) {
    if (axis === "step") return Number.isInteger(value) ? value.toLocaleString("en-US") : "";
    if (axis === "tokens") return value < 1e6 ? format(value) : `${Number((value / 1e6).toPrecision(4))}M`;
    if (value < 90) return `${Number(value.toPrecision(3))}s`;
    return value < 5400 ? `${Number((value / 60).toPrecision(3))}m` : `${Number((value / 3600).toPrecision(3))}h`;
  }

  // Replace the steps of a chart by the values of the chosen x axis, and remove the axis lines.
  function onAxis(chart) {
    const chosen = chart.lines.findIndex(line => line.key === AXES[axis]);
    const kept = chart.lines.map((line, index) => [line, chart.columns[index]])
      .filter(([line]) => line.kind !== "axis");
    return { ...chart, steps: chart.x, x: chosen < 0 ? chart.x : chart.columns[chosen],
      lines: kept.map(([line]) => line), columns: kept.map(([, column]) => column) };
  }

  function color(name) {
    const probe = document.createElement("span");
    probe.style.color = `var(--${name})`;
    grid.append(probe);
    const value = getComputedStyle(probe).color;
    probe.remove();
    return value;
  }

  // Merge new points into old ones; at an existing step, values that are not null replace old ones.
  function merged(old, added) {
    const keys = added.lines.map(line => line.key);
    const column = key => {
      const index = old.lines.findIndex(line => line.key === key);
      return index < 0 ? old.x.map(() => null) : old.columns[index].slice();
    };
    const x = old.x.slice(), columns = keys.map(column);
    const indices = new Map(x.map((step, index) => [step, index]));
    let sorted = true;
    added.x.forEach((step, from) => {
      let index = indices.get(step);
      if (index === undefined) {
        index = x.push(step) - 1;
        indices.set(step, index);
        sorted = sorted && (index === 0 || x[index - 1] < step);
        columns.forEach(values => values.push(null));
      }
      added.columns.forEach((values, column) => {
        if (values[from] !== null) columns[column][index] = values[from];
      });
    });
    if (sorted) return { ...added, x, columns };
    const order = x.map((_, index) => index).sort((a, b) => x[a] - x[b]);
    return { ...added, x: order.map(index => x[index]),
      columns: columns.map(values => order.map(index => values[index])) };
  }

  // Return lines and data of a chart: for one run, or for several runs with one color per run.
  function layout(versions, names) {
    // If all lines are on the right axis, use the left one.
    const left = versions.some(version => version.lines.some(line => !line.right));
    versions = versions.map(version => ({ ...version,
      lines: version.lines.map(line => ({ ...line, right: line.right && left })) }));
    if (versions.length === 1) {
      let numStacked = 0, numPlain = 0;
      const lines = versions[0].lines.map(line => ({
        ...line, dash: [], color: line.kind === "stack" ? STACKED[numStacked++ % STACKED.length]
          : line.kind === "band" ? "band"
          : line.kind === "error" ? COLORS[(numPlain + COLORS.length - 1) % COLORS.length] // that of its dots
          : COLORS[numPlain++ % COLORS.length],
      }));
      return { lines, data: [versions[0].x, ...versions[0].columns] };
    }
    const lines = [], tables = [];
    versions.forEach((version, run) => {
      const kept = version.lines.map((line, index) => [line, version.columns[index]])
        .filter(([line]) => line.kind !== "band");
      tables.push([version.x, ...kept.map(([, column]) => column)]);
      kept.forEach(([line], index) => lines.push({
        ...line, key: `${run}/${line.key}`, kind: ["dots", "error"].includes(line.kind) ? line.kind : "line",
        label: `${names[run]} ${line.label}`, color: COLORS[run % COLORS.length],
        dash: DASHES[line.kind === "dots" ? 0 : index % DASHES.length],
      }));
    });
    const data = tables.some(table => table[0].length) ? uPlot.join(tables)
      : [[], ...lines.map(() => [])];
    return { lines, data };
  }

  function cumulative(lines, data) {
    if (!lines.some(line => line.kind === "stack")) return data;
    const sums = data[0].map(() => 0);
    return [data[0], ...data.slice(1).map(column => column.map((value, index) =>
      value === null || value === undefined ? null : (sums[index] += value)))];
  }

  class Panel {
    constructor(chart) {
      this.id = chart.id;
      this.box = document.createElement("article");
      this.box.className = "chart";
      this.box.tabIndex = 0;
      this.box.dataset.testid = `chart-${chart.id}`;
      const title = document.createElement("h2");
      const name = document.createElement("span"), unit = document.createElement("small");
      unit.textContent = chart.unit ?? "";
      name.append(chart.title, " ", unit);
      title.append(name);
      this.at = document.createElement("span");
      this.at.className = "at";
      title.append(this.at);
      this.legend = document.createElement("div");
      this.legend.className = "legend";
      this.plot = document.createElement("div");
      this.plot.className = "plot";
      this.box.append(title, this.legend, this.plot);
      this.box.addEventListener("keydown", event => this.move(event));
      this.box.addEventListener("blur", () => this.leave());
      this.signature = "";
      grid.append(this.box);
    }

    draw(charts, names) {
      const versions = charts.map(onAxis);
      const { lines, data } = layout(versions, names);
      this.markers = markers.map(marker => ({ ...marker, x: positionOf(marker.step, versions[0]) }));
      this.values = data;
      this.title = versions[0].title;
      const signature = JSON.stringify(lines);
      const stacked = cumulative(lines, data);
      const hasData = data[0].length > 0 && data.slice(1).some(column => column.some(v => v != null));
      if (signature !== this.signature || hasData !== this.hasData || !this.u) {
        this.signature = signature;
        this.hasData = hasData;
        this.lines = lines;
        this.build(stacked);
      } else {
        this.u.setData(stacked, this.u.scales.x.min === this.u.data[0][0] ||
          this.showsEnd());
      }
      this.box.dataset.points = data[0].length;
      this.box.dataset.lastStep = data[0].length ? data[0][data[0].length - 1] : "";
      this.showValues(null);
    }

    showsEnd() { // false if the user zoomed in on earlier steps
      const x = this.u.data[0];
      return !x.length || this.u.scales.x.max >= x[x.length - 1];
    }

    build(data) {
      if (this.u) this.u.destroy();
      this.u = null;
      this.plot.replaceChildren();
      this.makeLegend();
      if (!this.hasData) {
        const message = document.createElement("p");
        message.className = "nothing";
        message.textContent = "no data yet";
        this.plot.append(message);
        return;
      }
      this.u = new uPlot(this.options(), data, this.plot);
    }

    options() {
      const [ink, gridline] = [color("muted"), color("grid")];
      const right = this.lines.some(line => line.right);
      const percent = this.lines.some(line => line.percent);
      const font = `11px ${getComputedStyle(document.body).fontFamily}`;
      const axis = { stroke: ink, font, grid: { stroke: gridline, width: 1 },
        ticks: { show: false }, gap: 6 };
      const labels = (u, splits) => splits.map(value => format(value, percent));
      const steps = (u, splits) => splits.map(formatX);
      return {
        width: Math.max(200, this.plot.clientWidth), height: HEIGHT,
        padding: [8, right ? 0 : 10, 0, 0],
        legend: { show: false },
        cursor: { sync: { key: "steps", scales: ["x", null] }, y: false,
          points: { size: 6 }, drag: { x: true, y: false, dist: 8 } },
        scales: { x: { time: false }, y: { range }, right: { range } },
        axes: [
          { ...axis, size: 26, values: steps, grid: { show: false }, space: 60 },
          { ...axis, size: 54, values: labels, space: 36 },
          ...(right ? [{ ...axis, side: 1, scale: "right", size: 54, space: 36,
            values: labels, grid: { show: false } }] : []),
        ],
        series: [{}, ...this.lines.map(seriesOf)],
        bands: bandsOf(this.lines),
        hooks: {
          draw: [u => drawMarkers(u, this.markers), u => drawErrors(u, this.lines)],
          setCursor: [u => this.showValues(u.cursor.idx)],
          ready: [() => { this.box.dataset.drawn = "1"; }],
        },
      };
    }

    makeLegend() {
      this.legendValues = [];
      const keys = this.lines.filter(line => !["band", "error"].includes(line.kind)).map(line => {
        const key = document.createElement("span");
        key.className = `key ${line.kind ?? "line"} ${STROKES[DASHES.indexOf(line.dash)] ?? ""}`;
        key.style.setProperty("--mark", `var(--${line.color})`);
        const value = document.createElement("b");
        value.dataset.testid = `${this.id}-${line.key}`;
        key.append(line.label, value);
        this.legendValues.push([value, this.lines.indexOf(line) + 1, line.percent]);
        return key;
      });
      this.legend.replaceChildren(...keys);
    }

    // Show the values under the cursor; without a cursor the newest value of each line.
    showValues(index) {
      const x = this.values[0];
      const hasCursor = index !== null && index !== undefined && index < x.length;
      this.at.textContent = hasCursor ? positionText(x, index, this.markers) : "";
      for (const [value, column, percent] of this.legendValues) {
        const numbers = this.values[column];
        let from = hasCursor ? index : x.length - 1;
        while (!hasCursor && from > 0 && (numbers[from] === null || numbers[from] === undefined)) from--;
        value.textContent = format(numbers[from], percent);
      }
      if (!hasCursor) this.box.setAttribute("aria-label", `${this.title}: ${this.legend.innerText}`);
    }

    move(event) {
      if (!this.u) return;
      const x = this.u.data[0];
      const current = this.u.cursor.idx ?? x.length;
      const to = { ArrowLeft: current - 1, ArrowRight: current + 1, Home: 0, End: x.length - 1 }[event.key];
      if (event.key === "Escape") this.leave();
      if (to === undefined || !x.length) return;
      event.preventDefault();
      const index = Math.max(0, Math.min(x.length - 1, to));
      this.u.setCursor({ left: this.u.valToPos(x[index], "x"), top: 20 }, true, true);
    }

    leave() {
      if (this.u) this.u.setCursor({ left: -10, top: -10 }, true, true);
    }

    fit() {
      const width = this.plot.clientWidth;
      if (this.u && width > 0 && width !== this.u.width) this.u.setSize({ width, height: HEIGHT });
    }
  }

  function positionOf(step, { steps, x }) {
    if (axis === "step" || !steps.length) return step;
    const index = steps.findIndex(at => at >= step);
    return x[index < 0 ? x.length - 1 : index];
  }

  function positionText(x, index, placed) {
    const near = Math.max(axis === "step" ? 0.5 : 0, (x[x.length - 1] - x[0]) / 150);
    const nearby = placed.filter(marker => Math.abs(marker.x - x[index]) <= near);
    const names = nearby.slice(0, 2).map(marker => `${marker.event} ${marker.text}`);
    const place = { step: `step ${x[index].toLocaleString("en-US")}`, time: formatX(x[index]),
      tokens: `${formatX(x[index])} tokens` }[axis];
    return [place, ...names].join("  \u00b7  ");
  }

  // The y range includes zero unless that would flatten the curve.
  function range(u, low, high) {
    if (low === null || low === undefined || (low === 0 && high === 0)) return [0, 1];
    if (low > 0 && low < 0.5 * high) low = 0;
    if (high < 0 && high > 0.5 * low) high = 0;
    const margin = 0.06 * (high - low || Math.abs(high) || 1);
    return [low === 0 ? 0 : low - margin, high === 0 ? 0 : high + margin];
  }

  function seriesOf(line) {
    const stroke = color(line.color);
    const base = { label: line.label, scale: line.right ? "right" : "y", dash: line.dash,
      stroke, width: 1.75, points: { show: isSinglePoint, size: 5, fill: stroke } };
    if (line.kind === "band") return { ...base, width: 0, points: { show: false } };
    if (line.kind === "error") return { ...base, paths: () => null, points: { show: false } };
    if (line.kind === "dots") {
      return { ...base, paths: () => null, points: { show: true, size: 8, fill: stroke } };
    }
    if (line.kind === "stack") return { ...base, width: 0, fill: stroke, points: { show: false } };
    return base;
  }

  function isSinglePoint(u, index) { // uPlot draws no line for a single point
    return u.data[index].filter(value => value !== null && value !== undefined).length === 1;
  }

  function bandsOf(lines) {
    const bands = [];
    lines.forEach((line, index) => {
      const next = lines[index + 1];
      if (line.kind === "band" && next && next.kind === "band") {
        bands.push({ series: [index + 2, index + 1], fill: color("band"), dir: -1 });
      }
      if (line.kind === "stack" && index > 0) bands.push({ series: [index + 1, index] });
    });
    return bands;
  }

  // Draw a bar between the values of each pair of error lines.
  function drawErrors(u, lines) {
    const { ctx } = u, cap = 3 * (devicePixelRatio || 1);
    ctx.save();
    ctx.lineWidth = 1.25 * (devicePixelRatio || 1);
    lines.forEach((line, index) => {
      if (line.kind !== "error" || lines[index + 1]?.kind !== "error" || lines[index - 1]?.kind === "error") return;
      ctx.strokeStyle = color(line.color);
      u.data[0].forEach((at, place) => {
        const [low, high] = [u.data[index + 1][place], u.data[index + 2][place]];
        if (low == null || high == null || at < u.scales.x.min || at > u.scales.x.max) return;
        const x = u.valToPos(at, "x", true);
        const [bottom, top] = [low, high].map(value => u.valToPos(value, "y", true));
        ctx.beginPath();
        ctx.moveTo(x, bottom);
        ctx.lineTo(x, top);
        for (const y of [bottom, top]) {
          ctx.moveTo(x - cap, y);
          ctx.lineTo(x + cap, y);
        }
        ctx.stroke();
      });
    });
    ctx.restore();
  }

  function drawMarkers(u, placed) {
    const { ctx, bbox } = u, ratio = devicePixelRatio || 1;
    ctx.save();
    for (const marker of placed) {
      if (marker.x < u.scales.x.min || marker.x > u.scales.x.max) continue;
      const x = Math.round(u.valToPos(marker.x, "x", true)) + 0.5;
      ctx.strokeStyle = ctx.fillStyle = color(BAD.has(marker.event) ? "bad" : "slate");
      ctx.globalAlpha = 0.55;
      ctx.lineWidth = ratio;
      ctx.setLineDash([2 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.globalAlpha = 0.9;
      ctx.beginPath();
      ctx.moveTo(x - 3.5 * ratio, bbox.top - 5 * ratio);
      ctx.lineTo(x + 3.5 * ratio, bbox.top - 5 * ratio);
      ctx.lineTo(x, bbox.top);
      ctx.fill();
    }
    ctx.restore();
  }

  return {
    merged,
    open(element) {
      grid = element;
      new ResizeObserver(() => panels.forEach(panel => panel.fit())).observe(grid);
    },
    AXES: Object.keys(AXES),
    setAxis(name) { // for the next draw
      axis = name;
      panels.forEach(panel => { panel.signature = ""; });
    },
    // `runs` is a list of {name, charts: Map id -> chart}.
    draw(runs, newMarkers) {
      markers = newMarkers;
      const loaded = runs.filter(run => run.charts.size);
      if (!loaded.length) return;
      for (const [id, chart] of new Map(loaded.flatMap(run => [...run.charts]))) {
        const versions = loaded.map(run => run.charts.get(id) ?? { ...chart, x: [], lines: [], columns: [] });
        if (!panels.has(id)) panels.set(id, new Panel(versions[0]));
        panels.get(id).draw(versions, loaded.map(run => run.name));
      }
    },
    repaint() { // rebuild all charts at the next draw, with the new colors
      panels.forEach(panel => { panel.signature = ""; });
    },
    colorOf: run => COLORS[run % COLORS.length],
  };
})();
