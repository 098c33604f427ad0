// Viewer of held-out problems with the answers of the model, by evaluation.
"use strict";

const Answers = (() => {
  const PASSING_REWARD = 1; // smallest reward of a right answer
  const element = id => document.getElementById(id);
  const known = new Map(); // step -> answers, as the server sends them
  let options = "", epoch = 0;
  let fetchAnswers = null; // reads the answers of a step; null in an exported file

  // Offer these evaluations; show the newest, unless the user has chosen another one.
  async function update(evaluations) {
    const available = evaluations.filter(each => fetchAnswers || known.has(each.step));
    const text = JSON.stringify(available);
    if (text === options) return;
    options = text;
    const select = element("evaluation");
    const wasNewest = select.selectedIndex === select.options.length - 1;
    const selected = select.value;
    select.replaceChildren(...available.map(({ step, accuracy, precision }) => {
      const option = document.createElement("option");
      option.value = step;
      option.textContent = `step ${step}: ${accuracy}${precision ? ` ${precision}` : ""}`;
      return option;
    }));
    if (wasNewest) select.selectedIndex = available.length - 1;
    else select.value = selected;
    try {
      await load();
    } catch (error) {
      options = ""; // to load at the next update
      throw error;
    }
  }

  async function load() {
    const value = element("evaluation").value;
    if (value === "") return show(null);
    const step = Number(value), at = epoch;
    if (!known.has(step)) {
      const answers = await fetchAnswers(step);
      if (at !== epoch) return;
      known.set(step, answers);
    }
    if (element("evaluation").value === value) show(known.get(step));
  }

  function matches(example) {
    const kind = element("by-score").value;
    const isRight = example.answers.every(answer => answer.reward >= PASSING_REWARD);
    if (kind === "cut") return example.answers.some(answer => answer.cut_off);
    return !kind || (kind === "right") === isRight;
  }

  function show(answers) {
    const examples = answers ? answers.examples.filter(matches) : [];
    document.querySelector('[data-testid="num-answers"]').textContent = !answers ? "no evaluation yet"
      : `${examples.length} of ${answers.num_examples} problems` +
        (answers.examples.length < answers.num_examples ? `; answers.jsonl has all` : "");
    element("answers").hidden = !examples.length;
    element("answers").replaceChildren(...examples.map(exampleElement));
  }

  function exampleElement(example) {
    const box = document.createElement("article");
    box.className = "example";
    box.dataset.testid = "example";
    box.append(field("question", example.question), field("expected", example.expected || "-"));
    const rollouts = document.createElement("div");
    rollouts.className = "rollouts";
    rollouts.append(...example.answers.map(Samples.rolloutElement));
    box.append(rollouts);
    return box;
  }

  function field(name, value) {
    const box = document.createElement("div"), label = document.createElement("p");
    const text = document.createElement("pre");
    label.className = "muted";
    label.textContent = name;
    text.dataset.testid = name;
    text.textContent = value;
    box.append(label, text);
    return box;
  }

  return {
    open(fetch) {
      fetchAnswers = fetch;
      element("evaluation").addEventListener("change", () => load().catch(() => {}));
      element("by-score").addEventListener("change", () => load().catch(() => {}));
      show(null);
    },
    showAll(answers) { answers.forEach(each => known.set(each.step, each)); }, // in an exported file
    clear() { known.clear(); options = ""; epoch++; element("evaluation").replaceChildren(); show(null); },
    update,
  };
})();
