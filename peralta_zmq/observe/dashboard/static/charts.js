// Charts with a shared cursor, drawn by uPlot. A chart is {id, title, unit, lines, x, columns}, as
// charts.py computes it from charts.toml; x are training steps, and columns has the values of one
// line each.
"use strict";

const Charts = (() => {
  const COLORS = ["blue", "amber", "teal", "rose", "violet", "slate"];
  const STACKED = ["soft-blue", "soft-amber", "slate", "soft-teal", "faint"];
  const DASHES = [[], [6, 4], [2, 3], [8, 3, 2, 3], [1, 6]];
  const STROKES = ["", "dashed", "dotted", "dashed", "dotted"]; // legend style of each of DASHES
  const HEIGHT = 190;
  const BAD = new Set(["leave", "killed", "skip", "roll_back", "publish_failed",
    "checkpoint_failed", "journal_failed"]);
  const panels = new Map(); // by chart id
  let grid, markers = [];

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
    const first = versions[0];
    const left = first.lines.some(line => !line.right); // if all lines are on the right axis, use the left one
    versions = versions.map(version => ({ ...version,
      lines: version.lines.map(line => ({ ...line, right: line.right && left })) }));
    if (versions.length === 1) {
      let numStacked = 0, numPlain = 0;
      const lines = versions[0].lines.map(line => ({
        ...line, dash: [], color: line.kind === "stack" ? STACKED[numStacked++ % STACKED.length]
          : line.kind === "band" ? "band" : COLORS[numPlain++ % COLORS.length],
      }));
      return { lines, data: [first.x, ...first.columns] };
    }
    const lines = [], tables = [];
    versions.forEach((version, run) => {
      const kept = version.lines.map((line, index) => [line, version.columns[index]])
        .filter(([line]) => line.kind !== "band");
      tables.push([version.x, ...kept.map(([, column]) => column)]);
      kept.forEach(([line], index) => lines.push({
        ...line, key: `${run}/${line.key}`, kind: line.kind === "dots" ? "dots" : "line",
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

    draw(versions, names) {
      const { lines, data } = layout(versions, names);
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
      const steps = (u, splits) => splits.map(value =>
        Number.isInteger(value) ? value.toLocaleString("en-US") : "");
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
          draw: [drawMarkers],
          setCursor: [u => this.showValues(u.cursor.idx)],
          ready: [() => { this.box.dataset.drawn = "1"; }],
        },
      };
    }

    makeLegend() {
      this.legendValues = [];
      const keys = this.lines.filter(line => line.kind !== "band").map(line => {
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
      this.at.textContent = hasCursor ? positionText(x, index) : "";
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

  function positionText(x, index) {
    const near = Math.max(0.5, (x[x.length - 1] - x[0]) / 150);
    const nearby = markers.filter(marker => Math.abs(marker.step - x[index]) <= near);
    const names = nearby.slice(0, 2).map(marker => `${marker.event} ${marker.text}`);
    return [`step ${x[index].toLocaleString("en-US")}`, ...names].join("  \u00b7  ");
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

  function drawMarkers(u) {
    const { ctx, bbox } = u, ratio = devicePixelRatio || 1;
    ctx.save();
    for (const marker of markers) {
      if (marker.step < u.scales.x.min || marker.step > u.scales.x.max) continue;
      const x = Math.round(u.valToPos(marker.step, "x", true)) + 0.5;
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
    // `runs` is a list of {name, charts: Map id -> chart}; all have the same charts.
    draw(runs, newMarkers) {
      markers = newMarkers;
      const loaded = runs.filter(run => run.charts.size);
      if (!loaded.length) return;
      for (const id of loaded[0].charts.keys()) {
        const versions = loaded.map(run => run.charts.get(id));
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
