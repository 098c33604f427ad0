// Viewer of sampled groups. Text written by a model is only assigned to textContent.
"use strict";

const Samples = (() => {
  const MAX_KEPT = 200;
  const element = id => document.getElementById(id);
  let groups = [], index = -1, paused = false, shownGenerators = "";  // index -1 = newest group

  function add(added) {
    groups.push(...added);
    groups = groups.slice(-MAX_KEPT);
    const generators = [...new Set(groups.map(group => group.generator))].sort();
    const select = element("by-generator");
    if (generators.join("\n") !== shownGenerators) {
      shownGenerators = generators.join("\n");
      const selected = select.value;
      select.replaceChildren(...["", ...generators].map(name => {
        const option = document.createElement("option");
        option.value = name;
        option.textContent = name || "all";
        return option;
      }));
      select.value = generators.includes(selected) ? selected : "";
    }
    if (!paused) index = -1;
    show();
  }

  function matches(group) {
    const generator = element("by-generator").value, kind = element("by-reward").value;
    const rewards = group.rollouts.map(rollout => rollout.reward);
    const equal = rewards.every(reward => reward === rewards[0]);
    return (!generator || group.generator === generator) &&
      (!kind || (kind === "equal") === equal);
  }

  function show() {
    const matching = groups.filter(matches);
    const current = index < 0 ? matching.length - 1 : Math.min(index, matching.length - 1);
    element("older").disabled = current <= 0;
    element("newer").disabled = current >= matching.length - 1;
    const box = element("sample");
    if (current < 0) {
      box.replaceChildren(paragraph(groups.length ? "No group matches this selection."
        : "The first group appears with the first step."));
      return;
    }
    box.replaceChildren(...groupElements(matching[current]));
  }

  function groupElements(group) {
    const facts = document.createElement("p");
    facts.className = "facts";
    for (const [name, value] of [["step", group.step], ["task", group.task],
      ["generator", group.generator], ["weights of step", group.policy_step],
      ["mean reward", group.mean === null ? "-" : group.mean.toFixed(3)]]) {
      const fact = document.createElement("span"), bold = document.createElement("b");
      bold.textContent = value;
      fact.append(`${name} `, bold);
      facts.append(fact);
    }
    const prompt = document.createElement("pre");
    prompt.className = "prompt";
    prompt.dataset.testid = "prompt";
    prompt.textContent = group.prompt.trimEnd();
    const rollouts = document.createElement("div");
    rollouts.className = "rollouts";
    rollouts.append(...group.rollouts.map(rolloutElement));
    return group.prompt ? [facts, prompt, rollouts] : [facts, rollouts];
  }

  function rolloutElement(rollout) {
    const box = document.createElement("div");
    box.className = "rollout";
    box.dataset.testid = "rollout";
    const bar = document.createElement("p");
    bar.className = rollout.reward === null ? "reward-bar unknown" : "reward-bar";
    const share = Math.max(0, Math.min(1, rollout.reward ?? 0));
    bar.style.setProperty("--share", `${100 * share}%`);
    const reward = document.createElement("b"), advantage = document.createElement("span");
    reward.dataset.testid = "reward";
    advantage.dataset.testid = "advantage";
    reward.textContent = `reward ${rollout.reward === null ? "-" : rollout.reward.toFixed(2)}`;
    advantage.textContent = rollout.advantage === null ? ""
      : `advantage ${rollout.advantage < 0 ? "" : "+"}${rollout.advantage.toFixed(2)}`;
    if (rollout.num_turns > 1) reward.textContent += `, ${rollout.num_turns} turns`;
    bar.append(reward, advantage);
    const text = document.createElement("pre");
    text.dataset.testid = "completion";
    text.textContent = rollout.text;
    box.append(bar, text);
    return box;
  }

  function paragraph(text) {
    const line = document.createElement("p");
    line.className = "muted";
    line.textContent = text;
    return line;
  }

  function setPaused(value) {
    paused = value;
    element("pause").setAttribute("aria-pressed", String(value));
    element("pause").textContent = value ? "follow" : "pause";
  }

  function move(by) {
    const matching = groups.filter(matches);
    const current = index < 0 ? matching.length - 1 : index;
    index = Math.max(0, Math.min(matching.length - 1, current + by));
    setPaused(true);
    show();
  }

  return {
    open() {
      element("older").addEventListener("click", () => move(-1));
      element("newer").addEventListener("click", () => move(1));
      element("pause").addEventListener("click", () => {
        if (!paused) index = groups.filter(matches).length - 1;
        setPaused(!paused);
        if (!paused) index = -1;
        show();
      });
      for (const id of ["by-generator", "by-reward"]) {
        element(id).addEventListener("change", () => { index = -1; show(); });
      }
      show();
    },
    add,
    clear() { groups = []; index = -1; setPaused(false); show(); },
    get paused() { return paused; },
    get newest() { return groups.length ? groups[groups.length - 1].number : 0; },
  };
})();
