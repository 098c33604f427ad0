"""The verdict: one sentence on a run's bottleneck or fault, with advice.

Each function in FINDINGS yields a Verdict for every condition that holds. The first one of level
"bad" counts, or else the first one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, TypeAlias

from rich.filesize import decimal

from peralta_zmq.errors import program_name
from peralta_zmq.observe.metrics import finite_mean, format_rate, generator_numbers, number
from peralta_zmq.observe.run_state import (
    MIN_ROWS,
    WINDOW,
    GeneratorStats,
    Rows,
    RunState,
    format_duration,
    run_state,
    stall_limit,
)

Level: TypeAlias = Literal["ok", "warn", "bad"]

FORK = "in a new run, which may continue (run.fork, run.from_step) from a step that is kept"
START_GENERATOR = f"start one: {program_name('generator')} @ CONFIG"


@dataclass(frozen=True, slots=True)
class Verdict:
    sentence: str
    advice: str
    level: Level = "warn"

    @property
    def text(self) -> str:
        return f"{self.sentence}; {self.advice}" if self.advice else self.sentence


@dataclass(frozen=True, slots=True)
class Limits:
    """Thresholds of the findings."""

    waiting: float = 0.25  # share of time that the trainer or a generator waits
    blocking: float = 0.15  # share of the trainer's time spent on publishing, or on the journal
    dropped: float = 0.10  # share of groups that were dropped as stale, or whose reward failed
    no_signal: float = 0.8  # share of groups with equal rewards
    moved: float = 0.5  # share of the masters' move that is published; less is reported
    # The policy diverges: its mismatch_kl was `calm` in the first step of a generator, with the
    # same engine and dtype, and is above `unsteady` in two of the `recent` steps, or above
    # `diverged` in one; and gradient norm or entropy have grown, or the reward has fallen.
    calm: float = 0.025
    unsteady: float = 0.1
    diverged: float = 0.3
    recent: int = 5
    truncated: float = 0.9  # share of completions that are cut off at their limit
    solved: float = 0.9  # lowest mean reward of a solved task
    hopeless: float = 0.1  # highest mean reward of one that is too hard


LIMITS = Limits()
REPLAYING = Verdict("replaying the journal of the earlier session", "", "ok")


def verdict(rows: Rows, events: Rows = (), *, now: float | None = None) -> Verdict:
    """The verdict on the newest rows of metrics.jsonl and events.jsonl, oldest first.

    Pass `now` (unix seconds) if the trainer should be running: a run that takes no more steps is
    then reported as stalled.
    """
    state = run_state(rows, events, now=now)
    if not state.rows:
        return _before_first_step(state, now)
    finders = FAULTS if state.session.is_complete else FINDINGS
    findings = [finding for find in finders for finding in find(state)]
    found = next((finding for finding in findings if finding.level == "bad"), findings[0])
    if state.session.is_complete and found.level != "bad":
        return replace(found, advice="")  # there is nothing to tune any more
    return found


def _before_first_step(state: RunState, now: float | None) -> Verdict:
    session = state.session
    if now is None or session.is_over:
        return Verdict("waiting for the first step", "", "ok")
    if session.is_replaying:
        return REPLAYING
    if session.is_evaluating:
        return Verdict("evaluating the untrained model before the first step", "", "ok")
    if reason := session.why_no_generator(now):
        return Verdict(f"no step yet: {reason}", START_GENERATOR, "bad")
    if found := next(_unreadable_weights(state), None):
        return found
    if not session.up:
        return Verdict("waiting for the first generator", START_GENERATOR, "ok")
    names = ", ".join(sorted(session.up))
    seconds = now - min(session.up.values())
    if seconds > 120.0:
        return Verdict(
            f"no step yet: {names} joined {format_duration(seconds)} ago",
            "the first step of a large model takes long; otherwise check the last lines of "
            "the trainer's and the generators' logs",
        )
    return Verdict(f"waiting for the first step; {names} joined", "", "ok")


def _unreadable_weights(state: RunState) -> Iterator[Verdict]:
    for name, reason in sorted(state.session.store_errors.items()):
        advice = f"{program_name('doctor')} on that machine checks the folder"
        yield Verdict(f"{name} cannot read new weights: {reason}", advice, "bad")


def _stalled(state: RunState) -> Iterator[Verdict]:
    session = state.session
    seconds = state.idle_seconds
    has_no_step = session.start > number(state.rows[-1], "time") and not math.isnan(seconds)
    # Without a step in this session, `seconds` counts from `active_since`, so the sum is "now".
    if has_no_step and (reason := session.why_no_generator(session.active_since + seconds)):
        yield Verdict(f"no step since the resume: {reason}", START_GENERATOR, "bad")
    if seconds > stall_limit(state.step_seconds):
        sentence = f"no step for {format_duration(seconds)}"
        if state.gone and not state.generators:
            sentence += f": no generator is up, {', '.join(state.gone)} left"
            yield Verdict(sentence, START_GENERATOR, "bad")
        advice = "check the newest event and the last lines of the trainer's log"
        yield Verdict(sentence, advice, "bad")


def _current_activity(state: RunState) -> Iterator[Verdict]:
    """What a resumed trainer does before its first step; later findings are of the past."""
    session = state.session
    if session.is_replaying:
        yield REPLAYING
    elif session.start > number(state.rows[-1], "time") and not math.isnan(state.idle_seconds):
        if session.up:
            names = ", ".join(sorted(session.up))
            yield Verdict(f"waiting for the first step since the resume; {names} joined", "", "ok")
        else:
            yield Verdict("waiting for a generator since the resume", START_GENERATOR, "ok")


def _gone(state: RunState) -> Iterator[Verdict]:
    # This finding hides later FINDINGS, but only while `gone` lists a generator: WINDOW steps.
    if state.gone:
        verb, pronoun = ("is", "it") if len(state.gone) == 1 else ("are", "them")
        sentence = f"{', '.join(state.gone)} {verb} gone, {len(state.generators)} still up"
        if state.generators:
            yield Verdict(sentence, f"restart {pronoun}; the others continue")
        else:
            yield Verdict(sentence, f"restart {pronoun}", "bad")


def _learning_rate(state: RunState) -> Iterator[Verdict]:
    # If updates are lost in rounding, the trainer's weights differ from the published ones anyway.
    if len(state.trained) < MIN_ROWS or number(state.rows[-1], "weights/moved", 1.0) < LIMITS.moved:
        return
    session = state.session
    mismatches = [generator_numbers(row, "mismatch_kl") for row in state.trained]
    for name in sorted({name for mismatch in mismatches for name in mismatch}):
        starts = (session.start, session.up.get(name, math.nan))
        since = max((start for start in starts if math.isfinite(start)), default=-math.inf)
        values = [  # with their rows, since the generator started
            (mismatch[name], row)
            for mismatch, row in zip(mismatches, state.trained, strict=True)
            if math.isfinite(mismatch.get(name, math.nan)) and number(row, "time", since) >= since
        ]
        recent = [value for value, _ in values[1:]][-LIMITS.recent :]
        is_unsteady = sum(value > LIMITS.unsteady for value in recent) >= 2
        if (
            not recent
            or values[0][0] > LIMITS.calm
            or not (is_unsteady or max(recent) > LIMITS.diverged)
        ):
            continue
        if changes := list(_divergence(values[0][1], state.trained[-LIMITS.recent :])):
            rise = f"mismatch_kl from {values[0][0]:.2g} to {max(recent):.2g}"
            rate = max(number(row, "learning_rate", 0.0) for row in state.trained)
            yield Verdict(
                f"the learning rate is too high: {', '.join([rise, *changes])}, with the same "
                "engine and dtype",
                f"lower train.learning_rate (up to {rate:.1g}) to a tenth, {FORK} before these "
                "steps",
                "bad",
            )
            return
    yield from _collapse(state)


def _collapse(state: RunState) -> Iterator[Verdict]:
    """A divergence before these rows: without any signal, rows have no mismatch_kl."""
    start = state.session.start
    for event in state.events:
        initial = number(event, "initial_kl")
        mismatch = number(event, "mismatch_kl")
        is_past = number(event, "time") < start or event.get("event") != "mismatch"
        if not is_past and initial <= LIMITS.calm and _equal_groups(state)[0] == 1.0:
            yield Verdict(
                f"the learning rate was too high: mismatch_kl rose from {initial:.2g} to "
                f"{mismatch:.2g} until step {number(event, 'step'):.0f}, and all groups have equal "
                "rewards now",
                f"lower train.learning_rate to a tenth, {FORK} before that step",
                "bad",
            )
            return


def _divergence(first: Mapping[str, object], recent: Rows) -> Iterator[str]:
    for key in ("grad_norm", "entropy"):
        start = number(first, key)
        worst = max((number(row, key, -math.inf) for row in recent), default=math.nan)
        if start > 0.0 and worst >= 2.0 * start:
            yield f"{key} from {start:.2g} to {worst:.2g}"
    start = number(first, "reward")
    worst = min((number(row, "reward", math.inf) for row in recent), default=math.nan)
    if start > 0.0 and worst <= 0.5 * start:
        yield f"reward from {start:.2f} to {worst:.2f}"


def _truncation(state: RunState) -> Iterator[Verdict]:
    def mean(metric: str) -> float:
        values = (number(row, f"completions/{metric}") for row in state.rows)
        return finite_mean(values, default=0.0)

    share = mean("clipped_ratio")
    if len(state.rows) < MIN_ROWS or share < 0.5 or _is_solved(state):
        return
    longer = "raise sampling.max_completion_length"
    if mean("mean_turns") > 1.0:
        longer += " or task.max_turns"
    limit = f"at their limit, after {mean('mean_length'):.0f} tokens on average"
    if share >= LIMITS.truncated and (ends := mean("special_token_ratio")) >= 0.1:
        yield Verdict(
            f"the end token never comes: {share:.0%} of completions are cut off {limit}, and "
            f"{ends:.0%} go on after a special token that should have ended them",
            "set eos_token_id in generation_config.json of the model to the token that ends its "
            "answers",
            "bad",
        )
    elif share == 1.0:
        yield Verdict(
            f"no completion ends: all are cut off {limit}",
            f"{longer}; if longer ones do not end either, the end token is missing: set "
            "eos_token_id in generation_config.json of the model",
            "bad",
        )
    else:
        is_useless = share >= LIMITS.truncated and _equal_groups(state)[0] >= LIMITS.no_signal
        yield Verdict(
            f"{share:.0%} of completions are cut off {limit}",
            f"{longer}, or ask for shorter answers in data.system_prompt",
            "bad" if is_useless else "warn",
        )


def _equal_reward(state: RunState) -> Iterator[Verdict]:
    rows = state.rows
    first = state.trained[0]
    share = _equal_groups(state)[0]
    rewards = [number(row, "reward") for row in rows]
    # Groups with equal rewards may be trained, for a loss that needs no rewards.
    is_trained = any(number(row, "num_loss_tokens", 0.0) > 0.0 for row in rows)
    if share < 1.0 or is_trained or not all(math.isclose(each, rewards[0]) for each in rewards):
        return
    every = f"every completion of the last {len(rows)} steps got {rewards[0]:.2f}"
    doctor = f"{program_name('doctor')} calls it on one completion"
    if rewards[0] <= 0.0:
        yield Verdict(
            f"the reward is never given: {every}",
            f"check the reward function ({doctor}) on a right answer; if it is correct, use easier "
            "problems",
            "bad",
        )
    elif (
        rewards[0] >= LIMITS.solved
        and number(first, "step") == 1.0
        and number(first, "reward") >= LIMITS.solved
    ):
        yield Verdict(
            f"the reward is always given: {every}",
            f"check the reward function ({doctor}) on a wrong answer; if it is correct, use harder "
            "problems",
            "bad",
        )


def _no_signal(state: RunState) -> Iterator[Verdict]:
    share, reward = _equal_groups(state)
    if share < LIMITS.no_signal or _is_solved(state):
        return
    sentence = f"{share:.0%} of groups have equal rewards, mean reward {reward:.2f}"
    advice = "raise sampling.temperature or sampling.num_generations"
    if reward <= LIMITS.hopeless:
        advice = (
            "check the reward function; if it is right, use easier problems or raise "
            "sampling.num_generations"
        )
    is_late = len(state.rows) >= WINDOW or state.session.is_complete
    is_bad = is_late and (share == 1.0 or reward <= LIMITS.hopeless)
    amount = "no" if is_bad and share == 1.0 else "little"
    yield Verdict(f"{amount} learning signal: {sentence}", advice, "bad" if is_bad else "warn")


def _rounding(state: RunState) -> Iterator[Verdict]:
    moved = number(state.rows[-1], "weights/moved")
    if len(state.rows) < MIN_ROWS or not moved < LIMITS.moved:  # also without the metric: NaN
        return
    mismatch = median(number(row, "mismatch_kl", 0.0) for row in state.rows)
    cause = ""
    if mismatch >= 0.05:
        cause = f"; the trainer computes with finer weights than these, mismatch_kl {mismatch:.2f}"
    yield Verdict(
        f"updates are lost in rounding: {moved:.0%} of the move of the master weights is in the "
        f"published weights{cause}",
        "set train.master_noise to true in a new run",
    )


def _solved(state: RunState) -> Iterator[Verdict]:
    share, reward = _equal_groups(state)
    if _is_solved(state):
        yield Verdict(
            f"the task is solved: mean reward {reward:.2f}, {share:.0%} of groups have equal "
            f"rewards; {next(_balance(state)).sentence}",
            "stop here, or train on harder problems",
            "ok",
        )


def _is_solved(state: RunState) -> bool:
    share, reward = _equal_groups(state)
    return share >= LIMITS.no_signal and reward >= LIMITS.solved


def _equal_groups(state: RunState) -> tuple[float, float]:
    """Share of groups with equal rewards (0 with few rows), and mean reward."""
    shares = [number(row, "frac_reward_zero_std", 0.0) for row in state.rows]
    reward = finite_mean((number(row, "reward", 0.5) for row in state.rows), default=0.5)
    return finite_mean(shares, default=0.0) if len(shares) >= MIN_ROWS else 0.0, reward


def _dropped_groups(state: RunState) -> Iterator[Verdict]:
    failed = {stats.name: state.growth(f"gen/{stats.name}/unscored") for stats in state.generators}
    num_failed = sum(failed.values())
    num_stale = state.growth("dropped/stale")
    if (share := num_failed / max(1.0, num_failed + state.num_groups)) >= LIMITS.dropped:
        yield Verdict(
            f"{share:.0%} of groups got no reward, most of them on "
            f"{max(failed, key=failed.__getitem__)}",
            "check its log: the reward function fails or exceeds task.reward_timeout",
        )
    if (share := num_stale / max(1.0, num_stale + state.num_groups)) >= LIMITS.dropped:
        senders = Counter[str]()
        # A minute earlier: a generator has one line per minute, further drops are only counted.
        since = number(state.rows[0], "time") - 60.0
        for event in state.events:
            is_stale = (event.get("event"), event.get("outcome")) == ("drop", "stale")
            if is_stale and number(event, "time") >= since:
                generator = str(event.get("sender")).rpartition("/")[0]  # without its incarnation
                senders[generator] += int(number(event, "count", 1))
        source = f", most of them from {senders.most_common(1)[0][0]}" if senders else ""
        yield Verdict(
            f"{share:.0%} of groups were dropped as stale{source}",
            "raise train.max_off_policy_steps"
            + ", or remove the slowest generator" * (len(state.generators) > 1),
        )


def _weights(state: RunState) -> Iterator[Verdict]:
    reported = [generator for generator in state.generators if math.isfinite(generator.step)]
    oldest = min(reported, key=lambda generator: generator.step, default=None)
    published = number(state.rows[-1], "weights/step", number(state.rows[-1], "step"))
    steps = published - oldest.step if oldest else 0.0
    seconds = steps * state.step_seconds
    if oldest and steps >= 3 and seconds >= 10.0:
        yield Verdict(
            f"{oldest.name} still samples from the weights of step {oldest.step:.0f}, which are "
            f"{steps:.0f} steps or {seconds:.0f} s old",
            f"check its link to weights.dir with {program_name('doctor')} on that machine",
        )
    if (share := state.share("time/publish")) >= LIMITS.blocking:
        yield Verdict(
            f"publishing blocks the trainer {share:.0%} of its time",
            "put weights.dir on a faster disk, or raise train.batch_size for fewer versions",
        )
    keys = ("weights/encode_seconds", "weights/write_seconds")
    seconds = median(sum(number(row, key, 0.0) for key in keys) for row in state.rows)
    if seconds >= max(0.5, state.step_seconds):
        size = decimal(int(median(number(row, "weights/bytes", 0.0) for row in state.rows)))
        yield Verdict(
            f"the disk or link of weights.dir is saturated: a version ({size}) takes "
            f"{seconds:.1f} s to publish, a step {_seconds(state.step_seconds)}",
            "raise weights.interval or weights.max_mbit_per_s, or use a faster weights.dir",
        )
    slowest = max(state.generators, key=lambda generator: generator.reload_seconds, default=None)
    if slowest and slowest.reload_seconds >= max(0.1, LIMITS.waiting * state.step_seconds):
        yield Verdict(
            f"{slowest.name} takes {slowest.reload_seconds:.1f} s to load new weights, a step "
            f"takes {_seconds(state.step_seconds)}",
            "raise train.batch_size for fewer versions",
        )


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{seconds:.1g} s"


def _journal(state: RunState) -> Iterator[Verdict]:
    if (share := state.share("time/journal")) >= LIMITS.blocking:
        yield Verdict(
            f"the disk of run.dir is saturated: the journal takes {share:.0%} of the "
            "trainer's time",
            "move run.dir to a local disk",
        )


def _complete(state: RunState) -> Iterator[Verdict]:
    reward = finite_mean(number(row, "reward") for row in state.rows)
    yield Verdict(
        f"the run is complete: mean reward {reward:.2f} in its last {len(state.rows)} steps",
        "",
        "ok",
    )


def _balance(state: RunState) -> Iterator[Verdict]:
    """Whether the trainer or the generators wait; yields at least one Verdict."""
    if len(state.rows) < MIN_ROWS:
        yield Verdict("too few steps to name a bottleneck", "", "ok")
        return
    yield from _one_blocked(state)
    blocked = finite_mean((stats.blocked for stats in state.generators), default=0.0)
    queue = finite_mean((stats.queue for stats in state.generators), default=0.0)
    trainer = f"{state.waiting:.0%}"
    generators = f"{blocked:.0%}"
    if state.waiting >= LIMITS.waiting and queue >= LIMITS.waiting:
        yield Verdict(
            f"the link to the trainer is saturated: generators are blocked {queue:.0%} of "
            f"their time by a full send queue, the trainer waits {trainer} for rollouts",
            "use a faster network",
        )
    elif state.waiting >= LIMITS.waiting and blocked >= LIMITS.waiting:
        yield Verdict(
            f"trainer and generators alternate: the trainer waits {trainer} of its time for "
            f"rollouts, generators {generators} for the trainer",
            "raise train.max_async_level",
        )
    elif state.waiting >= LIMITS.waiting:
        advice = "add a generator on another machine, or raise engine.slots"
        yield Verdict(
            f"the trainer waits {trainer} of its time for rollouts{_slow_generator(state)}", advice
        )
    elif blocked >= LIMITS.waiting:
        worst = max(state.generators, key=lambda generator: generator.blocked)
        yield Verdict(
            f"the trainer is the bottleneck: {worst.name} is blocked {worst.blocked:.0%} of "
            f"its time {_cause(worst)}",
            "use a faster device for the trainer"
            + "; fewer generators suffice" * (len(state.generators) > 1),
        )
    else:
        yield Verdict(
            f"balanced: the trainer waits {trainer} of its time for rollouts, generators "
            f"{generators} for the trainer",
            "",
            "ok",
        )


def _one_blocked(state: RunState) -> Iterator[Verdict]:
    """A single blocked generator, which the mean of all would not show."""
    worst = max(state.generators, key=lambda generator: generator.blocked, default=None)
    if worst is None or len(state.generators) < 2 or worst.blocked < 0.5:
        return
    blocked = (stats.blocked for stats in state.generators if stats is not worst)
    others = finite_mean(blocked, default=0.0)
    if others < LIMITS.waiting:
        yield Verdict(
            f"only {worst.name} is blocked, {worst.blocked:.0%} of its time "
            f"{_cause(worst)}, the others {others:.0%}; the trainer waits "
            f"{state.waiting:.0%} for rollouts",
            f"check its link to the trainer with {program_name('doctor')} on that machine"
            if _is_queue_full(worst)
            else f"raise train.max_async_level: {worst.name} has spare capacity",
        )


def _slow_generator(state: RunState) -> str:
    """The slowest generator, as text; empty unless it is much slower than the median."""
    measured = (generator for generator in state.generators if generator.tokens_per_s)
    slowest = min(measured, key=lambda generator: generator.speed, default=None)
    if not slowest or slowest.speed >= 0.5 * median(stats.speed for stats in state.generators):
        return ""
    total = sum(generator.tokens_per_s for generator in state.generators)
    return (
        f"; {slowest.name} is slow: {format_rate(slowest.tokens_per_s)} of "
        f"{format_rate(total)} tokens/s"
    )


def _is_queue_full(generator: GeneratorStats) -> bool:
    """Whether the full send queue is the cause of most of the time that it is blocked."""
    return generator.queue > generator.blocked / 2


def _cause(generator: GeneratorStats) -> str:
    return "by a full send queue" if _is_queue_full(generator) else "until the trainer catches up"


# Of a complete run; of the last, only a finding of level "bad" replaces that it is complete.
FAULTS = (_rounding, _learning_rate, _truncation, _equal_reward, _complete, _no_signal)
FINDINGS = (
    *(_unreadable_weights, _stalled, _current_activity, _gone, _learning_rate, _truncation),
    *(_equal_reward, _no_signal),
    *(_rounding, _dropped_groups, _weights, _journal, _solved, _balance),
)
