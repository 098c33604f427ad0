"""The six promises of docs/reliability.md, checked against the history of a run.

`python -m tools.promise_checker RUN_FOLDER [GENERATOR_LOG ...]` prints a table; its exit
code is 1 when a promise is broken. Knows a history; knows nothing of processes or files.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from peralta_zmq.observe.metrics import Row, number
from tools.run_history import History, Key, Record, read_history

# Fates that the journal knows.
IN_STEPS = ("trained", "no_signal")
SETTLED = (
    *IN_STEPS, "stale", "abandoned", "filtered", "evaluated", "mismatched", "invalid",
)  # fmt: skip
MAX_SHOWN = 5  # violations in one line


@dataclass(frozen=True, slots=True)
class Check:
    """One promise: what was looked at, and what breaks it."""

    promise: str
    text: str
    broken: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """For the table."""
        if not self.broken:
            return f"ok    {self.promise} {self.text}"
        more = f" and {len(self.broken) - MAX_SHOWN} more" if len(self.broken) > MAX_SHOWN else ""
        return f"FAIL  {self.promise} {self.text}: {'; '.join(self.broken[:MAX_SHOWN])}{more}"


def check(history: History) -> list[Check]:
    """All promises, in order."""
    return [
        torn_loads(history),
        trained_twice(history),
        lost_groups(history),
        too_old(history),
        steps_missing(history),
        accounts(history),
    ]


def torn_loads(history: History) -> Check:
    """P1: every version loaded is one that was published, and every one served was loaded; nothing
    had to be refused.
    """
    published = {
        (int(number(row, "number")), row.get("weights_id")) for row in _named(history, "publish")
    }
    numbers = {each for each, _ in published}
    loads = history.logs.loads
    resumed = {int(number(row, "step")) for row in _named(history, "resume")}
    hashes: dict[int, set[str]] = {}
    for load in loads:
        hashes.setdefault(load.number, set()).add(load.weights_id)
    # A trainer killed between the rename and its event has published without saying so: all
    # readers must agree, and the next start must have found itself at that step.
    broken = [
        f"version={load.number} weights_id={load.weights_id} was not published"
        for load in dict.fromkeys(loads)
        if (load.number, load.weights_id) not in published
        and (load.number in numbers or len(hashes[load.number]) > 1 or load.step not in resumed)
    ]
    served = sorted(set(history.logs.made_with.values()) - {load.weights_id for load in loads})
    broken += [f"weights_id={weights_id} was served and never loaded" for weights_id in served]
    broken += [f"{each} refused" for each in history.logs.refused]
    text = f"torn {len(broken)}: {len(loads)} loads of {len(hashes)} versions compared"
    return Check("P1", text, tuple(broken))


def trained_twice(history: History) -> Check:
    """P2: no group is in the journal twice, nor made twice under one number."""
    times = Counter(each.key for each in history.journal)
    broken = [
        f"{_shown(key)} is {count} times in the journal"
        for key, count in times.items()
        if count > 1
    ]
    broken += [f"{_shown(key)} was made twice" for key in history.logs.made_twice]
    broken += [f"step {step} was taken twice without a resume" for step in repeated_steps(history)]
    return Check("P2", f"twice {len(broken)}: {len(times)} groups in the journal", tuple(broken))


def lost_groups(history: History) -> Check:
    """P3: what a living generator made was trained, or dropped for a reason that the records bear
    out, or is under way.
    """
    fates, logs = fates_of(history), history.logs
    known = Counter(fates.values())
    lived = _lived_until(history, fates)
    broken = [f"{_shown(key)} was given up by its sender" for key in sorted(logs.lost - set(fates))]
    broken += [
        f"{_shown(each.key)} is {each.fate} at step {each.step} without a cause"
        for each in without_cause(history)
    ]
    broken += [
        f"{_shown(key)} of step {step} has no fate"
        for key, step in logs.made.items()
        if key not in fates and key not in logs.lost | history.rolled_back
        and lived.get(key[0], -1) > step + history.max_off_policy_steps
    ]  # fmt: skip
    what = f"{len(logs.made)} made, {known['trained']} trained, {known['stale']} stale"
    text = f"lost {len(broken)}: {what}"
    return Check("P3", text, tuple(broken))


def too_old(history: History) -> Check:
    """P4: no trained group is older than the limit, and each is as old as its sender's log says."""
    made = history.logs.made
    in_steps = [each for each in history.journal if each.fate in IN_STEPS]
    broken = [
        f"{_shown(each.key)} is {each.age} steps old at step {each.step}"
        for each in in_steps
        if not 0 <= each.age <= history.max_off_policy_steps
    ]
    broken += [
        f"{_shown(each.key)} is of step {each.policy_step}, and of step {made[each.key]} in the log"
        for each in in_steps
        if made.get(each.key, each.policy_step) != each.policy_step
    ]
    oldest = max((each.age for each in in_steps), default=0)
    text = f"staleness at most {oldest} steps, {history.max_off_policy_steps} allowed"
    return Check("P4", text, tuple(broken))


def steps_missing(history: History) -> Check:
    """P5: the run has ended by itself, with every step."""
    steps = [int(number(row, "step")) for row in history.rows]
    missing = sorted(set(range(1, history.max_steps + 1)) - set(steps))
    broken = [f"steps {missing[0]} to {missing[-1]}: {len(missing)} missing"] if missing else []
    if not history.summary:
        broken.append("there is no summary: the run has not ended")
    resumes = len(list(_named(history, "resume")))
    text = f"{len(set(steps))} steps of {history.max_steps}, {resumes} resumes"
    return Check("P5", text, tuple(broken))


def accounts(history: History) -> Check:
    """P6: what the summary counts is what the journal and the generators' logs say.

    The trainer knows of all groups of a sender whose last report it has; of another sender at
    least of those up to the last that came, and of more if a report told it so.
    """
    fates, made = fates_of(history), history.logs.made
    said = history.summary.get("accounting")
    if not isinstance(said, dict):
        return Check("P6", "accounting", ("the summary has none",))
    stated = Counter({str(name): int(count) for name, count in said.items()})
    heard: dict[str, int] = {}
    for sender, sequence in fates:
        heard[sender] = max(heard.get(sender, -1), sequence)
    reported = _last_reports(history)
    known = [key for key in made if key[0] in reported or key[1] <= heard.get(key[0], -1)]
    counted = Counter(fates.values())
    counted["lost or in flight"] = stated["made"] - len(fates)
    stated["lost or in flight"] = stated["lost"] + stated["in_flight"]
    broken = [f"{_shown(key)} was never made" for key in fates if key not in made]
    broken += [
        f"{name} is {stated[name]} in the summary, {counted[name]} in the records"
        for name in (*SETTLED, "lost or in flight")
        if stated[name] != counted[name]
    ]
    in_logs = Counter(sender for sender, _ in made)
    broken += [
        f"{sender} has made {count} by its last report, {in_logs[sender]} by the logs"
        for sender, count in reported.items()
        if count != in_logs[sender]
    ]
    if not len(known) <= stated["made"] <= len(made):
        between = " to ".join(str(count) for count in sorted({len(known), len(made)}))
        broken.append(f"made is {stated['made']} in the summary, {between} in the records")
    gone = history.logs.lost | (history.rolled_back - fates.keys())
    if stated["lost"] > len(gone):
        broken.append(f"lost is {stated['lost']} in the summary, {len(gone)} in the logs")
    unheard = len(made) - len(known)
    text = f"made {len(known)} + {unheard} of senders whose last report is missing"
    return Check("P6", text, tuple(broken))


def own_ends(history: History) -> Check:
    """No promise: a program that was restarted, and had not been killed by us, has a fault."""
    restarts = list(_named(history, "restart"))
    broken = [f"{row.get('worker')} ({row.get('reason')})"
              for row in restarts if not row.get("killed")]  # fmt: skip
    text = f"by themselves {len(broken)}, after a kill {len(restarts) - len(broken)}"
    return Check("ended", text, tuple(broken))


def _last_reports(history: History) -> dict[str, int]:
    """How many groups each sender has made, of those that told the trainer so at their end."""
    said = history.summary.get("last_reports")
    return (
        {str(sender): int(count) for sender, count in said.items()}
        if isinstance(said, dict)
        else {}
    )


def fates_of(history: History) -> dict[Key, str]:
    """What became of every group that the trainer has settled in a step that was taken."""
    last = _last_step(history)
    return {each.key: each.fate for each in history.journal if each.step <= last}


def without_cause(history: History) -> Iterator[Record]:
    """Records of groups whose fate is not one that such a group can have."""
    logs, distrusted = history.logs, _distrusted(history)
    left_behind, back_at = _left_behind(history)
    for each in history.journal:
        if each.key not in logs.made:
            continue  # see `accounts`
        age = each.step - 1 - logs.made[each.key]
        evaluates, left = each.key in logs.evaluating, logs.made_with[each.key] in left_behind
        causes = {
            "stale": age > history.max_off_policy_steps,
            "abandoned": left or back_at < logs.newest.get(each.key, -1) >= each.step,
            "filtered": history.filters,
            "evaluated": evaluates,
            "mismatched": distrusted.get(each.key[0], each.step) < each.step,
            "invalid": False,  # no generator of ours makes such a group
        }
        if not causes.get(each.fate, not (evaluates or left)):
            yield each


def _left_behind(history: History) -> tuple[set[str], float]:
    """Ids of the weights that were out when a roll-back went back to a step before theirs; and the
    earliest such step.
    """
    published: dict[str, float] = {}  # id -> step
    left, back_at, is_rolled_back = set[str](), math.inf, False
    for row in history.events:
        if row.get("event") == "publish":
            published[str(row.get("weights_id"))] = number(row, "step")
        is_rolled_back = is_rolled_back or row.get("event") == "roll_back"
        if row.get("event") == "resume" and is_rolled_back:
            back_at = min(back_at, number(row, "step"))
            left |= {
                weights_id for weights_id, step in published.items() if step > number(row, "step")
            }
            is_rolled_back = False
    return left, back_at


def _distrusted(history: History) -> dict[str, int]:
    """Senders that were set aside, and the first step after which."""
    steps: dict[str, int] = {}
    for row in _named(history, "mismatch"):
        if row.get("dropped"):
            sender, step = (
                f"{row.get('generator')}/{row.get('incarnation')}",
                int(number(row, "step")),
            )
            steps[sender] = min(step, steps.get(sender, step))
    return steps


def repeated_steps(history: History) -> list[int]:
    """Steps not above the one before, with no resume recorded between the two."""
    resumes = [number(row, "time") for row in _named(history, "resume")]
    found: list[int] = []
    for before, row in pairwise(history.rows):
        start, end = number(before, "time"), number(row, "time")
        explained = any(start <= moment <= end for moment in resumes)
        if number(row, "step") <= number(before, "step") and not explained:
            found.append(int(number(row, "step")))
    return found


def _lived_until(history: History, fates: Mapping[Key, str]) -> dict[str, int]:
    """By sender, a step at which it certainly lived and was heard after all it made before."""
    lived = dict.fromkeys(history.logs.complete, _last_step(history))
    for key in fates.keys() & history.logs.made.keys():
        lived[key[0]] = max(lived.get(key[0], -1), history.logs.made[key])
    return lived


def _last_step(history: History) -> int:
    return max((int(number(row, "step")) for row in history.rows), default=0)


def _named(history: History, event: str) -> Iterator[Row]:
    return (row for row in history.events if row.get("event") == event)


def _shown(key: Key) -> str:
    return f"{key[0]}/{key[1]}"


def table(checks: Iterable[Check]) -> str:
    """One line for each promise."""
    return "\n".join(each.line for each in checks)


def main(arguments: Sequence[str]) -> int:
    """Check the run in the first argument with the generators' logs in the others."""
    folder, *logs = map(Path, arguments)
    checks = check(read_history(folder, logs))
    sys.stdout.write(table(checks) + "\n")
    return int(any(each.broken for each in checks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
