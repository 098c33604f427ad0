// Polls the server once a second and updates the page; an exported file contains its data instead.
// Texts and numbers arrive already formatted and are only assigned to textContent.
"use strict";

(() => {
  const POLL_INTERVAL = 1000; // milliseconds
  const COLUMNS = ["name", "state", "step", "behind", "tokens_per_s", "blocked", "reload_s", "groups"];
  const element = id => document.getElementById(id);
  const testid = name => document.querySelector(`[data-testid="${name}"]`);
  const report = element("report"); // data of an exported file; null on a server
  const runs = []; // shown: {name, number, cursor, charts, state, settings, settingsTime}
  const wanted = new URLSearchParams(location.search).getAll("run"); // names of runs to show
  const compared = new Set(); // names of the runs selected in the list
  const listed = new Map(); // name of a run -> its row in the list
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
      if (!runs.length && !await findRuns()) return;
      let chartsChanged = false;
      for (const [index, run] of runs.entries()) {
        const cursor = encodeURIComponent(run.cursor);
        const update = await fetchJson(`api/runs/${run.number}?cursor=${cursor}`);
        chartsChanged = applyUpdate(run, update) || chartsChanged;
        if (update.reset && index === selected) clearTexts();
        more = more || update.loading;
      }
      lastUpdate = Date.now();
      show(chartsChanged);
      await fetchTexts();
      await fetchSettings();
    } catch (error) {
      showDisconnected();
    } finally {
      polling = false;
    }
    if (more) setTimeout(poll, 0);
  }

  function clearTexts() {
    Samples.clear();
    Answers.clear();
  }

  async function fetchTexts() {
    const { num_samples, evaluations } = runs[selected].state;
    await Samples.follow(num_samples);
    await Answers.update(evaluations);
  }

  async function fetchSettings() {
    const changed = runs.filter(run => run.settingsTime !== run.state.settings_time);
    for (const run of changed) {
      run.settings = (await fetchJson(`api/runs/${run.number}/settings`)).settings;
      run.settingsTime = run.state.settings_time;
    }
    if (changed.length) Settings.update(runs);
  }

  // Show the wanted runs, or the only one; without both, show the list and return false.
  async function findRuns() {
    const found = (await fetchJson("api/runs")).runs;
    const isOnly = found.length === 1 && !wanted.length;
    const names = found.map(run => run.run);
    const numbers = isOnly ? [0] : wanted.map(name => names.indexOf(name)).filter(at => at >= 0);
    lastUpdate = Date.now();
    if (!numbers.length) {
      showList(found);
      return false;
    }
    document.body.dataset.view = "run";
    element("all-runs").hidden = found.length < 2;
    openRuns(numbers.map(number => ({ name: names[number], number })));
    return true;
  }

  function showList(found) {
    document.body.dataset.view = "list";
    document.title = "runs \u00b7 peralta_zmq";
    setText(testid("run"), "peralta_zmq");
    setText(testid("about"), `${found.length} run${found.length === 1 ? "" : "s"}`);
    element("note").hidden = !wanted.length;
    setText(element("note"), wanted.length ? `There is no run ${wanted.join(", ")} here.` : "");
    element("no-runs").hidden = found.length > 0;
    testid("list").hidden = found.length === 0;
    const newestFirst = [...found].sort((a, b) => (a.age ?? Infinity) - (b.age ?? Infinity));
    const rows = newestFirst.map(showListed), body = element("list");
    if (rows.some((row, index) => body.children[index] !== row)) body.replaceChildren(...rows);
  }

  // Show the values of a run in its row of the list, which is created the first time.
  function showListed(run) {
    const row = listed.get(run.run) ?? listRow(run.run);
    const pill = row.querySelector(".pill");
    pill.dataset.status = run.status;
    setText(pill, run.status_text);
    const values = [`${run.step} of ${run.max_steps}`, run.reward, run.eval, run.model, run.task,
      run.age === null ? "-" : `${formatAge(run.age)} ago`];
    values.forEach((value, index) => setText(row.children[index + 3], value));
    return row;
  }

  function listRow(name) {
    const row = document.createElement("tr"), box = document.createElement("input");
    row.dataset.testid = `run-${name}`;
    box.type = "checkbox";
    box.setAttribute("aria-label", `compare ${name}`);
    box.addEventListener("change", () => {
      if (box.checked) compared.add(name);
      else compared.delete(name);
      element("compare").hidden = compared.size < 2;
      element("compare").href = linkTo([...compared]);
    });
    const link = document.createElement("a"), pill = document.createElement("span");
    link.href = linkTo([name]);
    link.textContent = name;
    pill.className = "pill";
    const titles = [...testid("list").querySelectorAll("th")];
    row.append(...titles.map((title, index) => {
      const cell = document.createElement("td");
      cell.className = title.className;
      if (index < 3) cell.append([box, link, pill][index]);
      else cell.dataset.label = title.textContent.toLowerCase();
      return cell;
    }));
    listed.set(name, row);
    return row;
  }

  function linkTo(names) {
    return `?${new URLSearchParams(names.map(name => ["run", name]))}`;
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

  function openRuns(opened) {
    runs.push(...opened.map(run => ({ ...run, cursor: "", charts: new Map(), state: null, settings: {} })));
    if (opened.length < 2) return;
    const box = element("runs");
    box.hidden = false;
    box.replaceChildren(...opened.map(({ name }, index) => {
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
    clearTexts();
    if (report) showReportTexts();
    show(false);
    if (!report) poll();
  }

  function showReport() {
    const { runs: exported, written } = JSON.parse(report.textContent);
    openRuns(exported.map(({ name, settings, samples, answers }) => ({ name, settings, samples, answers })));
    exported.forEach((run, index) => {
      applyUpdate(runs[index], run.update);
      runs[index].settings = run.settings;
    });
    showReportTexts();
    Settings.update(runs);
    show(true);
    setText(element("age"), `written ${new Date(1000 * written).toLocaleString()}`);
  }

  function showReportTexts() {
    const { samples, answers, state } = runs[selected];
    Samples.showAll(samples);
    Answers.showAll(answers);
    Answers.update(state.evaluations);
  }

  function setAxis(name) {
    Charts.setAxis(name);
    for (const button of element("axes").querySelectorAll("button")) {
      button.setAttribute("aria-pressed", String(button.dataset.axis === name));
    }
    show(true);
  }

  function saved(key, fallback) {
    try { return localStorage.getItem(key) ?? fallback; } catch { return fallback; }
  }

  function save(key, value) {
    try { localStorage.setItem(key, value); } catch { /* unavailable for local files */ }
  }

  const THEMES = ["auto", "light", "dark"];
  function setTheme(name) {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    setText(element("theme"), `theme: ${name}`);
    Charts.repaint();
    show(true);
  }

  Charts.open(element("charts"));
  Samples.open(report ? null : async query =>
    (await fetchJson(`api/runs/${runs[selected].number}/samples?${query}`)).samples);
  Answers.open(report ? null : step =>
    fetchJson(`api/runs/${runs[selected].number}/answers?step=${step}`));
  Settings.open();
  setTheme(THEMES.includes(saved("theme", "auto")) ? saved("theme", "auto") : "auto");
  setAxis(Charts.AXES.includes(saved("axis", "step")) ? saved("axis", "step") : "step");
  element("axes").addEventListener("click", event => {
    const name = event.target.dataset.axis;
    if (!name) return;
    save("axis", name);
    setAxis(name);
  });
  element("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % 3];
    save("theme", next);
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
