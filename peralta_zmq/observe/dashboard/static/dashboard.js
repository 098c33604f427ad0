// Polls the server once a second and updates the page; an exported file contains its data instead.
// Texts and numbers arrive already formatted and are only assigned to textContent.
"use strict";

(() => {
  const POLL_INTERVAL = 1000; // milliseconds
  const COLUMNS = ["name", "state", "step", "behind", "tokens_per_s", "blocked", "reload_s", "groups"];
  const element = id => document.getElementById(id);
  const testid = name => document.querySelector(`[data-testid="${name}"]`);
  const report = element("report"); // data of an exported file; null on a server
  const runs = []; // {name, cursor, charts, state}
  let selected = 0, lastUpdate = Date.now(), age = null, polling = false;

  function setText(target, text) {
    if (target.textContent !== text) target.textContent = text;
  }

  function applyUpdate(run, update) {
    if (update.reset) run.charts = new Map();
    for (const chart of update.charts) {
      const old = run.charts.get(chart.id);
      run.charts.set(chart.id, old ? Charts.merged(old, chart) : chart);
    }
    run.cursor = update.cursor;
    run.state = update.state;
    return update.charts.length > 0 || update.reset;
  }

  function show(chartsChanged) {
    const run = runs[selected];
    if (!run || !run.state) return;
    const { header, verdict, cards, generators, events, markers } = run.state;
    document.title = `${header.run} \u00b7 ${header.step}/${header.max_steps}`;
    setText(testid("run"), header.run);
    setText(testid("about"), [header.model, header.task].filter(Boolean).join(" \u00b7 ") || header.folder);
    setText(testid("step"), header.step);
    setText(testid("max-steps"), header.max_steps);
    setText(element("eta"), header.eta ? `${header.eta} left` : "");
    const share = 100 * Math.max(0, Math.min(1, header.share ?? 0));
    element("done").style.width = `${share}%`;
    element("bar").setAttribute("aria-valuenow", share.toFixed(0));
    showStatus(header.status, header.status_text, header.explanation);
    element("verdict").dataset.level = verdict.level;
    setText(testid("verdict"), verdict.sentence);
    setText(testid("advice"), verdict.advice);
    age = header.age;
    showAge();
    showCards(cards);
    showGenerators(generators);
    showEvents(events);
    const marks = JSON.stringify(markers);
    if (chartsChanged || marks !== run.marks) {
      run.marks = marks;
      Charts.draw(runs, runs.length > 1 ? [] : markers);
    }
  }

  function showStatus(name, text, explanation) {
    const pill = element("pill");
    pill.dataset.status = name;
    setText(pill, text);
    setText(element("note"), explanation);
    element("note").hidden = !explanation;
  }

  function showAge() {
    if (report) return;
    const seconds = age === null ? null : age + (Date.now() - lastUpdate) / 1000;
    setText(element("age"), seconds === null ? "" : `newest data ${formatAge(seconds)} ago`);
  }

  function formatAge(seconds) {
    if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
    if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
    return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
  }

  function showCards(cards) {
    const box = element("cards");
    if (box.children.length !== cards.length) box.replaceChildren(...cards.map(cardElement));
    cards.forEach(card => {
      setText(testid(`card-${card.id}`), card.value);
      setText(testid(`note-${card.id}`), card.note);
    });
  }

  function cardElement(card) {
    const box = document.createElement("div");
    box.className = "card";
    for (const [name, id] of [["label", ""], ["value", `card-${card.id}`], ["extra", `note-${card.id}`]]) {
      const line = document.createElement("div");
      line.className = name;
      if (id) line.dataset.testid = id;
      else line.textContent = card.label;
      box.append(line);
    }
    return box;
  }

  function showGenerators(generators) {
    element("no-generators").hidden = generators.length > 0;
    testid("generators").hidden = generators.length === 0;
    element("generators").replaceChildren(...generators.map(generator => {
      const row = document.createElement("tr");
      row.dataset.testid = `generator-${generator.name}`;
      const state = document.createElement("span");
      state.className = "state";
      state.dataset.state = generator.state;
      state.textContent = generator.state;
      COLUMNS.forEach((column, index) => {
        const cell = document.createElement("td");
        cell.dataset.testid = `generator-${generator.name}-${column}`;
        cell.append(column === "state" ? state : generator[column]);
        if (index > 1) cell.className = "number";
        row.append(cell);
      });
      return row;
    }));
  }

  function showEvents(events) {
    const content = JSON.stringify(events);
    if (content === showEvents.content) return;
    showEvents.content = content;
    element("events").replaceChildren(...events.map(event => {
      const line = document.createElement("li");
      const time = document.createElement("time"), name = document.createElement("span");
      const text = document.createElement("span");
      const date = event.time === null ? null : new Date(1000 * event.time);
      time.textContent = date ? date.toLocaleTimeString([], { hour12: false }) : "-";
      if (date) time.title = date.toLocaleString();
      name.textContent = event.event;
      text.className = "text";
      text.textContent = event.text;
      line.append(time, name, text);
      return line;
    }));
  }

  async function fetchJson(path) {
    const response = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (!response.ok) throw new Error(`${path}: ${response.status}`);
    return response.json();
  }

  async function poll() {
    if (polling || document.hidden) return;
    polling = true;
    let more = false;
    try {
      if (!runs.length) openRuns((await fetchJson("api/runs")).runs);
      let chartsChanged = false;
      for (const [index, run] of runs.entries()) {
        const cursor = encodeURIComponent(run.cursor);
        const update = await fetchJson(`api/runs/${index}?cursor=${cursor}`);
        chartsChanged = applyUpdate(run, update) || chartsChanged;
        if (update.reset && index === selected) Samples.clear();
        more = more || update.loading;
      }
      lastUpdate = Date.now();
      show(chartsChanged);
      await fetchSamples();
    } catch (error) {
      showDisconnected();
    } finally {
      polling = false;
    }
    if (more) setTimeout(poll, 0);
  }

  async function fetchSamples() {
    const { num_samples: newest } = runs[selected].state;
    if (newest < Samples.newest) Samples.clear(); // a restarted server counts from 1
    if (newest <= Samples.newest || Samples.paused) return;
    const after = Samples.newest;
    Samples.add((await fetchJson(`api/runs/${selected}/samples?after=${after}`)).samples);
  }

  function showDisconnected() {
    const state = runs[selected]?.state;
    if (state) {
      const isUp = generator => generator.state !== "gone";
      showGenerators(state.generators.map(generator =>
        isUp(generator) ? { ...generator, state: "unknown" } : generator));
      if (state.generators.some(isUp)) setText(testid("card-generators"), "-");
    }
    showStatus("reconnecting", "reconnecting",
      `No response from ${location.host} for ${formatAge((Date.now() - lastUpdate) / 1000)}; showing the ` +
      `last data and reconnecting automatically. If the run has ended: ${state?.header.dashboard ?? "bin/dashboard RUN"}`);
    showAge();
  }

  function openRuns(names) {
    runs.push(...names.map(name => ({ name, cursor: "", charts: new Map(), state: null })));
    if (names.length < 2) return;
    const box = element("runs");
    box.hidden = false;
    box.replaceChildren(...names.map((name, index) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = name;
      button.setAttribute("aria-pressed", String(index === selected));
      button.style.setProperty("--mark", `var(--${Charts.colorOf(index)})`);
      button.addEventListener("click", () => select(index));
      return button;
    }));
  }

  function select(index) {
    selected = index;
    [...element("runs").children].forEach((button, at) =>
      button.setAttribute("aria-pressed", String(at === index)));
    Samples.clear();
    if (report) Samples.add(runs[selected].samples);
    show(false);
    if (!report) poll();
  }

  function showReport() {
    const { runs: exported, written } = JSON.parse(report.textContent);
    openRuns(exported.map(run => run.name));
    exported.forEach((run, index) => {
      applyUpdate(runs[index], run.update);
      runs[index].samples = run.samples;
    });
    Samples.add(runs[0].samples);
    show(true);
    setText(element("age"), `written ${new Date(1000 * written).toLocaleString()}`);
  }

  const THEMES = ["auto", "light", "dark"];
  function setTheme(name) {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    setText(element("theme"), `theme: ${name}`);
    Charts.repaint();
    show(true);
  }

  function savedTheme() {
    try { return localStorage.getItem("theme") ?? "auto"; } catch { return "auto"; }
  }

  Charts.open(element("charts"));
  Samples.open();
  setTheme(THEMES.includes(savedTheme()) ? savedTheme() : "auto");
  element("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % 3];
    try { localStorage.setItem("theme", next); } catch { /* unavailable for local files */ }
    setTheme(next);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    Charts.repaint();
    show(true);
  });
  if (report) {
    showReport();
  } else {
    poll();
    setInterval(() => { poll(); showAge(); }, POLL_INTERVAL);
    document.addEventListener("visibilitychange", poll);
  }
})();
