// The page: asks once a second what is new, and puts it in its places. All words and numbers come
// ready from the server or from the file we are in, and are only ever put in as textContent.
"use strict";

(() => {
  const EVERY = 1000; // milliseconds
  const COLUMNS = ["name", "state", "step", "behind", "tokens_per_s", "blocked", "reload_s", "groups"];
  const element = id => document.getElementById(id);
  const testid = name => document.querySelector(`[data-testid="${name}"]`);
  const written = element("report");
  const runs = []; // {name, cursor, charts, state}
  let chosen = 0, heard = Date.now(), age = null, asking = false;

  function put(target, text) {
    if (target.textContent !== text) target.textContent = text;
  }

  function take(run, answer) {
    if (answer.anew) run.charts = new Map();
    for (const chart of answer.charts) {
      const old = run.charts.get(chart.id);
      run.charts.set(chart.id, old ? Charts.merged(old, chart) : chart);
    }
    run.cursor = answer.cursor;
    run.state = answer.state;
    return answer.charts.length > 0 || answer.anew;
  }

  function show(drawn) {
    const run = runs[chosen];
    if (!run || !run.state) return;
    const { header, verdict, cards, generators, events, markers } = run.state;
    document.title = `${header.run} \u00b7 ${header.step}/${header.max_steps}`;
    put(testid("run"), header.run);
    put(testid("about"), [header.model, header.task].filter(Boolean).join(" \u00b7 ") || header.folder);
    put(testid("step"), header.step);
    put(testid("max-steps"), header.max_steps);
    put(element("eta"), header.eta ? `${header.eta} left` : "");
    const share = 100 * Math.max(0, Math.min(1, header.share ?? 0));
    element("done").style.width = `${share}%`;
    element("bar").setAttribute("aria-valuenow", share.toFixed(0));
    condition(header.condition, header.condition_text, header.explanation);
    element("verdict").dataset.level = verdict.level;
    put(testid("verdict"), verdict.sentence);
    put(testid("advice"), verdict.advice);
    age = header.age;
    showAge();
    showCards(cards);
    showGenerators(generators);
    showEvents(events);
    const marks = JSON.stringify(markers);
    if (drawn || marks !== run.marks) {
      run.marks = marks;
      Charts.draw(runs, runs.length > 1 ? [] : markers);
    }
  }

  function condition(name, text, explanation) {
    const pill = element("pill");
    pill.dataset.condition = name;
    put(pill, text);
    put(element("note"), explanation);
    element("note").hidden = !explanation;
  }

  function showAge() {
    if (written) return;
    const seconds = age === null ? null : age + (Date.now() - heard) / 1000;
    put(element("age"), seconds === null ? "" : `newest data ${ago(seconds)} ago`);
  }

  function ago(seconds) {
    if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
    if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
    return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
  }

  function showCards(cards) {
    const box = element("cards");
    if (box.children.length !== cards.length) box.replaceChildren(...cards.map(card));
    cards.forEach(each => {
      put(testid(`card-${each.id}`), each.value);
      put(testid(`note-${each.id}`), each.note);
    });
  }

  function card(each) {
    const box = document.createElement("div");
    box.className = "card";
    for (const [name, id] of [["label", ""], ["value", `card-${each.id}`], ["extra", `note-${each.id}`]]) {
      const line = document.createElement("div");
      line.className = name;
      if (id) line.dataset.testid = id;
      else line.textContent = each.label;
      box.append(line);
    }
    return box;
  }

  function showGenerators(generators) {
    element("no-generators").hidden = generators.length > 0;
    testid("generators").hidden = generators.length === 0;
    element("generators").replaceChildren(...generators.map(each => {
      const row = document.createElement("tr");
      row.dataset.testid = `generator-${each.name}`;
      const state = document.createElement("span");
      state.className = "state";
      state.dataset.state = each.state;
      state.textContent = each.state;
      COLUMNS.forEach((column, place) => {
        const cell = document.createElement("td");
        cell.dataset.testid = `generator-${each.name}-${column}`;
        cell.append(column === "state" ? state : each[column]);
        if (place > 1) cell.className = "number";
        row.append(cell);
      });
      return row;
    }));
  }

  function showEvents(events) {
    const now = JSON.stringify(events);
    if (now === showEvents.shown) return;
    showEvents.shown = now;
    element("events").replaceChildren(...events.map(each => {
      const line = document.createElement("li");
      const time = document.createElement("time"), name = document.createElement("span");
      const text = document.createElement("span");
      const moment = each.time === null ? null : new Date(1000 * each.time);
      time.textContent = moment ? moment.toLocaleTimeString([], { hour12: false }) : "-";
      if (moment) time.title = moment.toLocaleString();
      name.textContent = each.event;
      text.className = "text";
      text.textContent = each.text;
      line.append(time, name, text);
      return line;
    }));
  }

  async function fetched(path) {
    const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
    return answer.json();
  }

  async function ask() {
    if (asking || document.hidden) return;
    asking = true;
    let more = false;
    try {
      if (!runs.length) open((await fetched("api/runs")).runs);
      let drawn = false;
      for (const [place, run] of runs.entries()) {
        const cursor = encodeURIComponent(run.cursor);
        const answer = await fetched(`api/runs/${place}?cursor=${cursor}`);
        drawn = take(run, answer) || drawn;
        if (answer.anew && place === chosen) Samples.clear();
        more = more || answer.loading;
      }
      heard = Date.now();
      show(drawn);
      await askForSamples();
    } catch (error) {
      lost();
    } finally {
      asking = false;
    }
    if (more) setTimeout(ask, 0);
  }

  async function askForSamples() {
    const { num_samples: newest } = runs[chosen].state;
    if (newest < Samples.newest) Samples.clear(); // a server that was started anew counts anew
    if (newest <= Samples.newest || Samples.paused) return;
    const after = Samples.newest;
    Samples.add((await fetched(`api/runs/${chosen}/samples?after=${after}`)).samples);
  }

  function lost() {
    const state = runs[chosen]?.state, folder = state?.header.folder ?? "RUN";
    if (state) {
      const up = each => each.state !== "gone";
      showGenerators(state.generators.map(each => up(each) ? { ...each, state: "unknown" } : each));
      if (state.generators.some(up)) put(testid("card-generators"), "-");
    }
    condition("reconnecting", "reconnecting",
      `No answer from ${location.host} for ${ago((Date.now() - heard) / 1000)}. The numbers stay; ` +
      `the page goes on by itself when it is back. Of a run that is over: bin/dashboard ${folder}`);
    showAge();
  }

  function open(names) {
    runs.push(...names.map(name => ({ name, cursor: "", charts: new Map(), state: null })));
    if (names.length < 2) return;
    const box = element("runs");
    box.hidden = false;
    box.replaceChildren(...names.map((name, place) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = name;
      button.setAttribute("aria-pressed", String(place === chosen));
      button.style.setProperty("--mark", `var(--${Charts.colourOf(place)})`);
      button.addEventListener("click", () => choose(place));
      return button;
    }));
  }

  function choose(place) {
    chosen = place;
    [...element("runs").children].forEach((button, at) =>
      button.setAttribute("aria-pressed", String(at === place)));
    Samples.clear();
    if (written) Samples.add(runs[chosen].samples);
    show(false);
    if (!written) ask();
  }

  function showReport() {
    const { runs: known, written: moment } = JSON.parse(written.textContent);
    open(known.map(each => each.name));
    known.forEach((each, place) => {
      take(runs[place], each.answer);
      runs[place].samples = each.samples;
    });
    Samples.add(runs[0].samples);
    show(true);
    put(element("age"), `written ${new Date(1000 * moment).toLocaleString()}`);
  }

  const THEMES = ["auto", "light", "dark"];
  function theme(name) {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    put(element("theme"), `theme: ${name}`);
    Charts.repaint();
    show(true);
  }

  function remembered() {
    try { return localStorage.getItem("theme") ?? "auto"; } catch { return "auto"; }
  }

  Charts.open(element("charts"));
  Samples.open();
  theme(THEMES.includes(remembered()) ? remembered() : "auto");
  element("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % 3];
    try { localStorage.setItem("theme", next); } catch { /* a file may not remember */ }
    theme(next);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    Charts.repaint();
    show(true);
  });
  if (written) {
    showReport();
  } else {
    ask();
    setInterval(() => { ask(); showAge(); }, EVERY);
    document.addEventListener("visibilitychange", ask);
  }
})();
