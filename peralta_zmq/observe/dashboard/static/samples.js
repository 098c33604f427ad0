// Whole groups side by side. What a model wrote is only ever put in as textContent.
"use strict";

const Samples = (() => {
  const MAX_KEPT = 200;
  const element = id => document.getElementById(id);
  let groups = [], place = -1, paused = false, told = "";

  function add(added) {
    groups.push(...added);
    groups = groups.slice(-MAX_KEPT);
    const generators = [...new Set(groups.map(group => group.generator))].sort();
    const choice = element("by-generator");
    if (generators.join("\n") !== told) {
      told = generators.join("\n");
      const chosen = choice.value;
      choice.replaceChildren(...["", ...generators].map(name => {
        const option = document.createElement("option");
        option.value = name;
        option.textContent = name || "all";
        return option;
      }));
      choice.value = generators.includes(chosen) ? chosen : "";
    }
    if (!paused) place = -1;
    show();
  }

  function fits(group) {
    const generator = element("by-generator").value, kind = element("by-reward").value;
    const rewards = group.rollouts.map(each => each.reward);
    const equal = rewards.every(reward => reward === rewards[0]);
    return (!generator || group.generator === generator) &&
      (!kind || (kind === "equal") === equal);
  }

  function show() {
    const fitting = groups.filter(fits);
    const now = place < 0 ? fitting.length - 1 : Math.min(place, fitting.length - 1);
    element("older").disabled = now <= 0;
    element("newer").disabled = now >= fitting.length - 1;
    const box = element("sample");
    if (now < 0) {
      box.replaceChildren(paragraph(groups.length ? "No group fits this choice."
        : "The first groups appear here with the first step."));
      return;
    }
    box.replaceChildren(...picture(fitting[now]));
  }

  function picture(group) {
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
    rollouts.append(...group.rollouts.map(rollout));
    return group.prompt ? [facts, prompt, rollouts] : [facts, rollouts];
  }

  function rollout(each) {
    const box = document.createElement("div");
    box.className = "rollout";
    box.dataset.testid = "rollout";
    const worth = document.createElement("p");
    worth.className = each.reward === null ? "worth unknown" : "worth";
    const share = Math.max(0, Math.min(1, each.reward ?? 0));
    worth.style.setProperty("--share", `${100 * share}%`);
    const reward = document.createElement("b"), advantage = document.createElement("span");
    reward.dataset.testid = "reward";
    advantage.dataset.testid = "advantage";
    reward.textContent = `reward ${each.reward === null ? "-" : each.reward.toFixed(2)}`;
    advantage.textContent = each.advantage === null ? ""
      : `advantage ${each.advantage < 0 ? "" : "+"}${each.advantage.toFixed(2)}`;
    worth.append(reward, advantage);
    const text = document.createElement("pre");
    text.dataset.testid = "completion";
    text.textContent = each.text;
    box.append(worth, text);
    return box;
  }

  function paragraph(text) {
    const found = document.createElement("p");
    found.className = "muted";
    found.textContent = text;
    return found;
  }

  function pause(is) {
    paused = is;
    element("pause").setAttribute("aria-pressed", String(is));
    element("pause").textContent = is ? "follow" : "pause";
  }

  function turn(by) {
    const fitting = groups.filter(fits);
    const now = place < 0 ? fitting.length - 1 : place;
    place = Math.max(0, Math.min(fitting.length - 1, now + by));
    pause(true);
    show();
  }

  return {
    open() {
      element("older").addEventListener("click", () => turn(-1));
      element("newer").addEventListener("click", () => turn(1));
      element("pause").addEventListener("click", () => {
        if (!paused) place = groups.filter(fits).length - 1;
        pause(!paused);
        if (!paused) place = -1;
        show();
      });
      for (const id of ["by-generator", "by-reward"]) {
        element(id).addEventListener("change", () => { place = -1; show(); });
      }
      show();
    },
    add,
    clear() { groups = []; place = -1; pause(false); show(); },
    get paused() { return paused; },
    get newest() { return groups.length ? groups[groups.length - 1].number : 0; },
  };
})();
