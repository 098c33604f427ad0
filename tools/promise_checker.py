"""Check the six promises of docs/reliability.md against the history of a run.

`python -m tools.promise_checker RUN_FOLDER [GENERATOR_LOG ...]` prints one line per promise; the
exit code is 1 if one is broken. The outcome of a group is what the trainer's journal records about
it: trained, no_signal (in a batch, but with equal rewards), or the reason why it was dropped.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import cast

from peralta_zmq.observe.metrics import Row, number
from peralta_zmq.observe.run_state import SESSION_ENDS, SESSION_STARTS
from tools.hostile_sender import CLOSE_SECONDS
from tools.run_history import History, Key, Record, read_history

IN_STEPS = ("trained", "no_signal")  # outcomes of groups in the batch of a training step
RECORDED = (*IN_STEPS, "stale", "abandoned", "filtered", "evaluated", "invalid")
# Outcomes of the groups of tools.hostile_sender, and what they are called in the report.
HOSTILE_OUTCOMES = {
    "invalid": "refused at decode",
    "excluded": "excluded from the loss",
    "abandoned": "abandoned, of future weights",
    "stale": "poisoned but stale",
    "in flight": "in flight at a kill or outage (not checked)",
    "unaccounted": "unaccounted",
}
EXCLUSION_MINUTES = 10.0  # a soak of this length must exclude a group
# A group must be recorded if the trainer took this number of steps, without a kill, while its
# sender tried to deliver it: a step receives from every connection.
DELIVERY_STEPS = 5
# A silent connection is opened again after 10 s, then its groups are sent again.
IN_FLIGHT_SECONDS = 15
MAX_SHOWN = 5  # violations in one line


@dataclass(frozen=True, slots=True)
class Check:
    """Result for one promise: a summary, and its violations."""

    promise: str
    text: str
    broken: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        if not self.broken:
            return f"ok    {self.promise} {self.text}"
        more = f" and {len(self.broken) - MAX_SHOWN} more" if len(self.broken) > MAX_SHOWN else ""
        return f"FAIL  {self.promise} {self.text}: {'; '.join(self.broken[:MAX_SHOWN])}{more}"


def check(history: History) -> list[Check]:
    return [
        unpublished_loads(history),
        trained_twice(history),
        unaccounted_groups(history),
        too_old(history),
        steps_missing(history),
        accounts(history),
    ]


def unpublished_loads(history: History) -> Check:
    """P1: only published versions were loaded, only loaded ones were sampled from, none refused."""
    published = {
        (int(number(row, "number")), row.get("weights_id")) for row in _named(history, "publish")
    }
    numbers = {version for version, _ in published}
    loads = history.logs.loads
    resumed = {int(number(row, "step")) for row in _named(history, "resume")}
    hashes: dict[int, set[str]] = {}
    for load in loads:
        hashes.setdefault(load.number, set()).add(load.weights_id)
    # A trainer killed between the rename and its event has published without recording it: all
    # readers must agree on the version, and the trainer must have resumed at its step.
    broken = [
        f"version={load.number} weights_id={load.weights_id} was not published"
        for load in dict.fromkeys(loads)
        if (load.number, load.weights_id) not in published
        and (load.number in numbers or len(hashes[load.number]) > 1 or load.step not in resumed)
    ]
    served = sorted(set(history.logs.made_with.values()) - {load.weights_id for load in loads})
    broken += [f"weights_id={weights_id} was served and never loaded" for weights_id in served]
    broken += [f"{version} refused" for version in history.logs.refused]
    text = f"torn {len(broken)}: {len(loads)} loads of {len(hashes)} versions compared"
    return Check("P1", text, tuple(broken))


def trained_twice(history: History) -> Check:
    """P2: no group is in the journal twice, no group number was used twice."""
    times = Counter(record.key for record in history.journal)
    broken = [
        f"{_shown(key)} is {count} times in the journal"
        for key, count in times.items()
        if count > 1
    ]
    broken += [f"{_shown(key)} was made twice" for key in history.logs.made_twice]
    broken += [f"step {step} was taken twice without a resume" for step in repeated_steps(history)]
    return Check("P2", f"twice {len(broken)}: {len(times)} groups in the journal", tuple(broken))


def unaccounted_groups(history: History) -> Check:
    """P3: every group of a live generator was trained, dropped for a valid reason, or in flight."""
    outcomes, logs = outcomes_of(history), history.logs
    known = Counter(outcomes.values())
    last_arrived, undelivered = _last_arrived(history, outcomes), _first_undelivered(history)
    broken = [
        f"{_shown(key)} was given up by its sender" for key in sorted(logs.lost - set(outcomes))
    ]
    broken += [
        f"{_shown(record.key)} is {record.outcome} at step {record.step} without a cause"
        for record in without_cause(history)
    ]
    accounted = outcomes.keys() | logs.lost
    broken += [
        f"{_shown(key)} of step {step} has no outcome"
        for key, step in logs.made.items()
        if key not in accounted
        and (key[0] in logs.complete or key[1] < undelivered.get(key[0], 0))
        and _must_have_arrived(history, key, last_arrived.get(key[0], -1))
    ]
    what = f"{len(logs.made)} made, {known['trained']} trained, {known['stale']} stale"
    text = f"lost {len(broken)}: {what}"
    return Check("P3", text, tuple(broken))


def too_old(history: History) -> Check:
    """P4: no trained group exceeds the staleness limit, and ages agree with the senders' logs."""
    made = history.logs.made
    in_steps = [record for record in history.journal if record.outcome in IN_STEPS]
    broken = [
        f"{_shown(record.key)} is {record.age} steps old at step {record.step}"
        for record in in_steps
        if not 0 <= record.age <= history.max_off_policy_steps
    ]
    broken += [
        f"{_shown(record.key)} is of step {record.policy_step}, "
        f"and of step {made[record.key]} in the log"
        for record in in_steps
        if made.get(record.key, record.policy_step) != record.policy_step
    ]
    oldest = max((record.age for record in in_steps), default=0)
    text = f"staleness at most {oldest} steps, {history.max_off_policy_steps} allowed"
    return Check("P4", text, tuple(broken))


def steps_missing(history: History) -> Check:
    """P5: the run has finished with every training step."""
    steps = [int(number(row, "step")) for row in history.rows]
    missing = sorted(set(range(1, history.max_steps + 1)) - set(steps))
    broken = [f"steps {missing[0]} to {missing[-1]}: {len(missing)} missing"] if missing else []
    if not history.summary:
        broken.append("there is no summary: the run has not ended")
    resumes = len(list(_named(history, "resume")))
    text = f"{len(set(steps))} steps of {history.max_steps}, {resumes} resumes"
    return Check("P5", text, tuple(broken))


def accounts(history: History) -> Check:
    """P6: the counts of the summary agree with the journal and the generators' logs.

    The trainer counts all groups of a sender whose final status it received; of another sender at
    least those up to the last one that arrived.
    """
    outcomes, made = outcomes_of(history), history.logs.made.keys() | history.logs.hostile.keys()
    accounting = history.summary.get("accounting")
    if not isinstance(accounting, dict):
        return Check("P6", "accounting", ("the summary has none",))
    stated = Counter({str(name): int(count) for name, count in accounting.items()})
    last_received: dict[str, int] = {}
    for sender, group_number in outcomes:
        last_received[sender] = max(last_received.get(sender, -1), group_number)
    reported = _final_statuses(history)
    known = [key for key in made if key[0] in reported or key[1] <= last_received.get(key[0], -1)]
    counted = Counter(outcomes.values())
    counted["lost or in flight"] = stated["made"] - len(outcomes)
    stated["lost or in flight"] = stated["lost"] + stated["in_flight"]
    broken = [f"{_shown(key)} was never made" for key in outcomes if key not in made]
    broken += [
        f"{name} is {stated[name]} in the summary, {counted[name]} in the records"
        for name in (*RECORDED, "lost or in flight")
        if stated[name] != counted[name]
    ]
    in_logs = Counter(sender for sender, _ in made)
    broken += [
        f"{sender} has made {count} by its final status, {in_logs[sender]} by the logs"
        for sender, count in reported.items()
        if count != in_logs[sender]
    ]
    if not len(known) <= stated["made"] <= len(made):
        between = " to ".join(str(count) for count in sorted({len(known), len(made)}))
        broken.append(f"made is {stated['made']} in the summary, {between} in the records")
    if stated["lost"] > (num_lost := len(history.logs.lost)):
        broken.append(f"lost is {stated['lost']} in the summary, {num_lost} in the logs")
    uncounted = len(made) - len(known)
    text = f"made {len(known)} + {uncounted} of senders whose final status is missing"
    return Check("P6", text, tuple(broken))


def unexpected_ends(history: History) -> Check:
    """No promise: a program that was restarted, but not killed by the test, has crashed."""
    restarts = list(_named(history, "restart"))
    broken = [f"{row.get('worker')} ({row.get('reason')})"
              for row in restarts if not row.get("killed")]  # fmt: skip
    text = f"by themselves {len(broken)}, after a kill {len(restarts) - len(broken)}"
    return Check("ended", text, tuple(broken))


def hostile_groups(history: History, *, minutes: float = 0.0) -> Check:
    """No promise: every hostile group was refused or excluded, and no other group was excluded.

    `minutes` is the length of the soak.
    """
    hostile, excluded = history.logs.hostile, _excluded(history)
    outcomes = {key: _hostile_outcome(history, key, excluded) for key in hostile}
    completed = _completed(history)
    late = {record.key for record in history.journal if record.step - 1 in completed}
    broken = [
        f"{_shown(key)} is {outcome}, not {hostile[key].expected}"
        for key, outcome in outcomes.items()
        if outcome not in (hostile[key].expected, "in flight")
        and (outcome, hostile[key].expected) != ("stale", "excluded")
        and not (outcome == "abandoned" and key in late)
    ]
    others = {name for name, _ in excluded} - {_shown(key) for key in hostile}
    broken += [f"{name} is excluded, and its sender is not hostile" for name in sorted(others)]
    counts = Counter(outcomes.values())
    if minutes >= EXCLUSION_MINUTES and not counts["excluded"]:
        broken.append("none is excluded from the loss")
    counted = ", ".join(f"{counts[outcome]} {text}" for outcome, text in HOSTILE_OUTCOMES.items())
    return Check("hostile", f"{len(hostile)} groups sent: {counted}", tuple(broken))


def _hostile_outcome(history: History, key: Key, excluded: set[tuple[str, int]]) -> str:
    """Outcome of a hostile group: in the journal, or in a batch but excluded from the loss."""
    record = next((record for record in history.journal if record.key == key), None)
    if record is None:
        is_due = _was_delivered(history, history.logs.hostile[key].time)
        return "unaccounted" if is_due else "in flight"
    if record.outcome not in IN_STEPS:
        return record.outcome
    if (_shown(key), record.step) in excluded:
        return "excluded"
    return record.outcome if record.step <= _last_step(history) else "in flight"


def _excluded(history: History) -> set[tuple[str, int]]:
    return {
        (name, int(number(row, "step")))
        for row in _named(history, "exclude")
        for name in cast("dict[str, str]", row["groups"])
    }


def _was_delivered(history: History, sent_at: float) -> bool:
    """Whether a group sent at this time must have arrived and become durable.

    True if the trainer took DELIVERY_STEPS steps before it was killed, ended or started, and
    before the sender gave up.
    """
    boundaries = [
        number(row, "time")
        for row in history.events
        if row.get("event") in (*SESSION_STARTS, *SESSION_ENDS)
        or (row.get("event") == "killed" and row.get("worker") == "trainer")
    ]
    end = min((time for time in boundaries if time > sent_at), default=math.inf)
    end = min(end, sent_at + CLOSE_SECONDS)
    return sum(sent_at < number(row, "time") <= end for row in history.rows) >= DELIVERY_STEPS


def _final_statuses(history: History) -> dict[str, int]:
    """Number of groups by sender, as reported to the trainer at its end."""
    reports = history.summary.get("final_statuses")
    if not isinstance(reports, dict):
        return {}
    return {str(sender): int(count) for sender, count in reports.items()}


def outcomes_of(history: History) -> dict[Key, str]:
    """Outcome of every group recorded in a training step that was taken, or after the last one."""
    last = history.max_steps + 1 if history.summary else _last_step(history)
    return {record.key: record.outcome for record in history.journal if record.step <= last}


def without_cause(history: History) -> Iterator[Record]:
    """Records whose outcome is impossible for their group."""
    logs = history.logs
    undone, resumed_at = _undone_weights(history)
    completed = _completed(history)
    for record in history.journal:
        if record.key not in logs.made:
            continue  # `accounts` reports it
        age = record.step - 1 - logs.made[record.key]
        evaluates = record.key in logs.evaluating
        is_undone = logs.made_with[record.key] in undone
        causes = {
            "stale": age > history.max_off_policy_steps,
            "abandoned": is_undone
            or resumed_at < logs.newest.get(record.key, -1) >= record.step
            or record.step > history.max_steps
            or record.step - 1 in completed,  # a later session has continued the complete run
            "filtered": history.filters,
            "evaluated": evaluates,
            "invalid": False,  # a generator of this program never sends an invalid group
        }
        if not causes.get(record.outcome, not (evaluates or is_undone)):
            yield record


def _completed(history: History) -> set[float]:
    """The last steps of sessions that completed the run; a later session may have continued it."""
    return {number(row, "step") for row in history.events if row.get("event") == "complete"}


def _undone_weights(history: History) -> tuple[set[str], float]:
    """Ids of weights published after the step to which a roll-back returned; the earliest step."""
    published: dict[str, float] = {}  # id -> step
    undone, resumed_at, is_rolled_back = set[str](), math.inf, False
    for row in history.events:
        if row.get("event") == "publish":
            published[str(row.get("weights_id"))] = number(row, "step")
        is_rolled_back = is_rolled_back or row.get("event") == "roll_back"
        if row.get("event") == "resume" and is_rolled_back:
            resumed_at = min(resumed_at, number(row, "step"))
            undone |= {
                weights_id for weights_id, step in published.items() if step > number(row, "step")
            }
            is_rolled_back = False
    return undone, resumed_at


def repeated_steps(history: History) -> list[int]:
    """Steps that do not follow the previous one, without a resume in between."""
    resumes = [number(row, "time") for row in _named(history, "resume")]
    repeated: list[int] = []
    for before, row in pairwise(history.rows):
        start, end = number(before, "time"), number(row, "time")
        explained = any(start <= moment <= end for moment in resumes)
        if number(row, "step") <= number(before, "step") and not explained:
            repeated.append(int(number(row, "step")))
    return repeated


def _last_arrived(history: History, outcomes: Mapping[Key, str]) -> dict[str, int]:
    last_arrived: dict[str, int] = {}
    for key in outcomes.keys() & history.logs.made.keys():
        last_arrived[key[0]] = max(last_arrived.get(key[0], -1), history.logs.made[key])
    return last_arrived


def _first_undelivered(history: History) -> dict[str, int]:
    """By sender, the first group that it had not delivered when it sent the last one that arrived.

    If the sender was then killed, it took this group and later ones with it.
    """
    first: dict[str, int] = {}
    for record in history.journal:
        first[record.key[0]] = max(first.get(record.key[0], 0), record.min_group_number)
    return first


def _must_have_arrived(history: History, key: Key, last_arrived: int) -> bool:
    """Whether the group is too old for the last step that its sender's groups could reach."""
    logs = history.logs
    last_step = last_arrived
    if key[0] in logs.complete and logs.seconds_before_end(key) > IN_FLIGHT_SECONDS:
        last_step = _last_step(history)
    return last_step > logs.made[key] + history.max_off_policy_steps


def _last_step(history: History) -> int:
    return max((int(number(row, "step")) for row in history.rows), default=0)


def _named(history: History, event: str) -> Iterator[Row]:
    return (row for row in history.events if row.get("event") == event)


def _shown(key: Key) -> str:
    return f"{key[0]}/{key[1]}"


def main(arguments: Sequence[str]) -> int:
    folder, *logs = map(Path, arguments)
    checks = check(read_history(folder, logs))
    sys.stdout.write("".join(f"{result.line}\n" for result in checks))
    return int(any(result.broken for result in checks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
