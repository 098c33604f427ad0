// Settings of a run; of several runs only those that differ.
"use strict";

const Settings = (() => {
  const element = id => document.getElementById(id);
  let runs = []; // {name, settings}

  function show() {
    const names = [...new Set(runs.flatMap(run => Object.keys(run.settings)))];
    const text = element("find-setting").value.trim().toLowerCase();
    const values = name => runs.map(run => run.settings[name] ?? "-");
    const shown = names.filter(name => (runs.length < 2 || new Set(values(name)).size > 1) &&
      [name, ...values(name)].some(each => each.toLowerCase().includes(text)));
    element("settings-title").textContent = runs.length < 2 ? "Settings" : "Settings that differ";
    const head = document.createElement("thead"), body = document.createElement("tbody");
    if (runs.length > 1) head.append(row("th", ["setting", ...runs.map(run => run.name)]));
    body.append(...shown.map(name => row("td", [name, ...values(name)])));
    if (!shown.length) body.append(row("td", [names.length ? "none" : "config.toml cannot be read"]));
    element("settings").replaceChildren(head, body);
  }

  function row(kind, texts) {
    const line = document.createElement("tr");
    line.append(...texts.map(text => {
      const cell = document.createElement(kind);
      text.split(/(?<=[._\/])/).forEach(part => cell.append(part, document.createElement("wbr")));
      return cell;
    }));
    return line;
  }

  return {
    open() { element("find-setting").addEventListener("input", show); },
    update(newRuns) { runs = newRuns; show(); },
  };
})();
