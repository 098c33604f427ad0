// Viewer of sampled groups. Text written by a model is only assigned to textContent.
"use strict";

const Samples = (() => {
  const MAX_KEPT = 400; // groups, while the newest are shown
  const PAGE = 12; // groups in a response
  const MAX_PAGES = 20; // pages that one click reads to find a group that matches the selection
  const element = id => document.getElementById(id);
  let groups = []; // some consecutive groups of the run, ascending by number
  let shown = null, paused = false; // `shown` is null while the newest group is shown
  let total = 0, shownGenerators = "", epoch = 0;
  let fetchGroups = null; // reads groups from the server; null in an exported file

  // Show the newest groups, unless paused. `count` is the number of groups of the run.
  async function follow(count) {
    if (count < total) clear(); // a restarted server counts from 1
    total = count;
    if (paused || newest() >= total || !fetchGroups) return;
    const at = epoch, added = await fetchGroups("");
    if (at !== epoch || paused || !added.length) return;
    const isNext = added[0].number <= newest() + 1;
    groups = isNext ? groups.concat(added.filter(group => group.number > newest())) : added;
    groups = groups.slice(-MAX_KEPT);
    show();
  }

  function newest() { return groups.length ? groups[groups.length - 1].number : 0; }

  function matches(group) {
    const generator = element("by-generator").value, kind = element("by-reward").value;
    const rewards = group.rollouts.map(rollout => rollout.reward);
    const equal = rewards.every(reward => reward === rewards[0]);
    return (!generator || group.generator === generator) &&
      (!kind || (kind === "equal") === equal);
  }

  function current() {
    return shown ?? groups.findLast(matches);
  }

  // The nearest group that matches the selection, before (by = -1) or after (by = 1) a number.
  function nearest(number, by) {
    return by < 0 ? groups.findLast(group => group.number < number && matches(group))
      : groups.find(group => group.number > number && matches(group));
  }

  function hasMore(by) {
    if (!fetchGroups || !groups.length) return false;
    return by < 0 ? groups[0].number > 1 : newest() < total;
  }

  async function load(by) {
    const at = epoch, first = groups[0].number;
    const start = by < 0 ? Math.max(1, first - PAGE) : newest() + 1;
    const added = await fetchGroups(`first=${start}`);
    if (at !== epoch) return false;
    if (by < 0) groups = added.filter(group => group.number < first).concat(groups);
    else groups = groups.concat(added.filter(group => group.number > newest()));
    return added.length > 0;
  }

  async function move(by) {
    setPaused(true);
    const from = current()?.number ?? (by < 0 ? newest() + 1 : 0);
    let found = nearest(from, by);
    for (let page = 0; !found && page < MAX_PAGES && hasMore(by); page++) {
      if (!await load(by)) return;
      found = nearest(from, by);
    }
    shown = found ?? shown;
    show();
  }

  async function goTo(step) {
    setPaused(true);
    if (fetchGroups) {
      const at = epoch, added = await fetchGroups(`step=${step}`);
      if (at !== epoch) return;
      groups = added.length ? added : groups;
    }
    shown = groups.find(group => group.step >= step && matches(group)) ?? current();
    show();
  }

  function show() {
    showGenerators();
    const group = current();
    element("older").disabled = !(hasMore(-1) || group && nearest(group.number, -1));
    element("newer").disabled = !(hasMore(1) || group && nearest(group.number, 1));
    element("sample").replaceChildren(...(group ? groupElements(group) : [paragraph(groups.length
      ? "None of the groups read so far matches; older and newer search the others." : "The first group appears with the first step.")]));
  }

  function showGenerators() {
    const generators = [...new Set(groups.map(group => group.generator))].sort();
    if (generators.join("\n") === shownGenerators) return;
    shownGenerators = generators.join("\n");
    const select = element("by-generator"), selected = select.value;
    select.replaceChildren(...["", ...generators].map(name => {
      const option = document.createElement("option");
      option.value = name;
      option.textContent = name || "all";
      return option;
    }));
    select.value = generators.includes(selected) ? selected : "";
  }

  function groupElements(group) {
    const facts = document.createElement("p");
    facts.className = "facts";
    for (const [name, value] of [["step", group.step], ["group", `${group.number} of ${Math.max(total, newest())}`],
      ["task", group.task], ["generator", group.generator], ["weights of step", group.policy_step],
      ["outcome", group.outcome], ["mean reward", group.mean === null ? "-" : group.mean.toFixed(3)]]) {
      if (value === "") continue;
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

  // Also for answers to held-out problems, which have no advantage and no num_turns.
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
    advantage.textContent = (rollout.advantage ?? null) === null ? ""
      : `advantage ${rollout.advantage < 0 ? "" : "+"}${rollout.advantage.toFixed(2)}`;
    if (rollout.num_turns > 1) reward.textContent += `, ${rollout.num_turns} turns`;
    bar.append(reward, advantage);
    const text = document.createElement("pre");
    text.dataset.testid = "completion";
    text.textContent = rollout.text;
    box.append(bar, text);
    if (rollout.cut_off) {
      const mark = document.createElement("p");
      mark.className = "cut-off";
      mark.dataset.testid = "cut-off";
      mark.textContent = "cut off at the length limit";
      box.append(mark);
    }
    return box;
  }

  function paragraph(text) {
    const line = document.createElement("p");
    line.className = "muted";
    line.textContent = text;
    return line;
  }

  function setPaused(value) {
    if (value && !paused) shown = current() ?? null;
    if (!value) shown = null;
    paused = value;
    element("pause").setAttribute("aria-pressed", String(value));
    element("pause").textContent = value ? "follow" : "pause";
  }

  function clear() {
    groups = [];
    total = 0;
    epoch++;
    setPaused(false);
    show();
  }

  return {
    open(fetch) {
      fetchGroups = fetch;
      element("older").addEventListener("click", () => move(-1).catch(() => {}));
      element("newer").addEventListener("click", () => move(1).catch(() => {}));
      element("pause").addEventListener("click", () => {
        const wasPaused = paused, count = total;
        setPaused(!paused);
        if (wasPaused && fetchGroups) {
          groups = [];
          follow(count).catch(() => {});
        } else show();
      });
      for (const id of ["by-generator", "by-reward"]) {
        element(id).addEventListener("change", () => {
          if (shown && !matches(shown)) {
            shown = nearest(shown.number, 1) ?? nearest(shown.number, -1) ?? null;
          }
          show();
        });
      }
      element("from-step").addEventListener("change", event => {
        if (event.target.value !== "") goTo(Number(event.target.value)).catch(() => {});
      });
      show();
    },
    showAll(added) { groups = added; show(); }, // in an exported file
    follow, clear, rolloutElement,
  };
})();
