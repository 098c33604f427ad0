"""Who waits for whom, in one sentence: a pure function of a run's newest rows and events.

Knows this project's knobs; knows nothing of files, terminals or pages. The first finding that holds
is the verdict, what is bad before all else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal, TypeAlias

from peralta_zmq.observe.progress import duration
from peralta_zmq.observe.run_state import (  # fmt: skip
    ENOUGH,
    WINDOW,
    GeneratorStats,
    Known,
    Session,
    View,
    figure,
    is_over,
    observed,
    session_of,
)

Level: TypeAlias = Literal["ok", "warn", "bad"]

WAITS = 0.25  # share of the time from which waiting is worth a word
BLOCKED_ALONE = 0.5  # share of its time from which one blocked generator is its own case
STALLS = 0.15  # the same for publishing and for the journal
LATE = 0.10  # share of groups that come to nothing
SILENCE_SECONDS, SILENCE_STEPS = 30.0, 10.0  # without a step, whichever is longer
FIRST_STEP_SECONDS = 120.0  # after the first generator has joined
START_ONE = "start one: bin/generator @ CONFIG"
STALE_SECONDS, STALE_STEPS = 10.0, 3  # behind the newest weights, both
SATURATED_SECONDS = 0.5  # a version that is out sooner is no burden
SLOW = 0.5  # of the median generator's speed
NO_SIGNAL = 0.8  # share of groups with equal rewards
SOLVED, HOPELESS = 0.9, 0.1  # mean reward


@dataclass(frozen=True, slots=True)
class Verdict:
    """What holds, what to change (empty when nothing need be), and how bad it is."""

    sentence: str
    advice: str
    level: Level

    @property
    def text(self) -> str:
        """Sentence and advice as one line."""
        return f"{self.sentence}; {self.advice}" if self.advice else self.sentence


def verdict(
    rows: Sequence[Known], events: Sequence[Known] = (), *, now: float | None = None
) -> Verdict:
    """The one sentence about a run, from rows of metrics.jsonl and events.jsonl, oldest first.

    Only the last WINDOW rows count. `now` (unix seconds) is for a run that is under way: with it,
    a run that has stopped making steps is told.
    """
    view = observed(rows, events, now=now)
    if view is None:
        return _before_the_first_step(events, now)
    found = [each for look in FINDINGS if (each := look(view)) is not None]
    return next((each for each in found if each.level == "bad"), found[0])


def waiting(rows: Sequence[Known], events: Sequence[Known] = ()) -> tuple[float, int]:
    """The share of its time that the trainer waits, and of how many rows: those of the verdict.

    NaN where there is none to count.
    """
    view = observed(rows, events)
    return (view.waiting, len(view.rows)) if view else (math.nan, 0)


def _before_the_first_step(events: Sequence[Known], now: float | None) -> Verdict:
    session = session_of(events)
    if now is not None and not is_over(events):
        if session.evaluates:
            return Verdict("the untrained model is evaluated before the first step", "", "ok")
        if nobody := _nobody(session, now):
            return Verdict(f"no step yet: {nobody}", START_ONE, "bad")
        waited = now - min(session.up.values(), default=now)
        if waited > FIRST_STEP_SECONDS:
            return Verdict(
                f"no step yet: {', '.join(sorted(session.up))} joined, {duration(waited)} ago",
                "a large model's first step takes long; else look at the trainer's last lines "
                "and at theirs", "warn",
            )  # fmt: skip
    return Verdict("waiting for the first step", "", "ok")


def _nobody(session: Session, now: float) -> str:
    """Why nobody is up in a session without a step; empty while somebody is, or may still come."""
    if session.up:
        return ""
    if session.left:
        return f"{', '.join(session.left)} left"
    seconds = now - session.awake
    return f"no generator has come in {duration(seconds)}" if seconds > SILENCE_SECONDS else ""


# What may be found. Each returns None when it does not hold.


def _stopped(view: View) -> Verdict | None:
    """No step for a long time."""
    if not view.quiet_seconds > max(SILENCE_SECONDS, SILENCE_STEPS * view.step_seconds):
        return None
    sentence = f"no step for {duration(view.quiet_seconds)}"
    if view.gone and not view.fares:
        return Verdict(
            f"{sentence}: no generator is up, {', '.join(view.gone)} left", START_ONE, "bad"
        )
    return Verdict(sentence, "look at the newest event and at the trainer's last lines", "bad")


def _resumed(view: View) -> Verdict | None:
    """The session has taken no step, and nobody is up to make one."""
    session = view.session
    if math.isnan(view.quiet_seconds) or not session.begun > figure(view.rows[-1], "time"):
        return None
    nobody = _nobody(session, session.awake + view.quiet_seconds)
    return Verdict(f"no step since the resume: {nobody}", START_ONE, "bad") if nobody else None


def _no_signal(view: View) -> Verdict | None:
    """Groups whose rewards are all equal teach nothing."""
    share, reward = _equal_groups(view)
    if share < NO_SIGNAL or reward >= SOLVED:
        return None
    told = f"{_percent(share)} of groups have equal rewards, mean reward {reward:.2f}"
    if reward <= HOPELESS:
        advice = "check the reward; else easier problems, or more sampling.num_generations"
    else:
        advice = "raise sampling.temperature or sampling.num_generations"
    if share == 1.0 and len(view.rows) >= WINDOW:
        return Verdict(f"no learning signal: {told}", advice, "bad")
    return Verdict(f"little learning signal: {told}", advice, "warn")


def _solved(view: View) -> Verdict | None:
    """The same, since all answers are right: who waits for whom is told, but matters no more."""
    share, reward = _equal_groups(view)
    if share < NO_SIGNAL or reward < SOLVED:
        return None
    return Verdict(
        f"the task is solved: mean reward {reward:.2f}, {_percent(share)} of groups have equal "
        f"rewards; {_balance(view).sentence}",
        "stop here, or train on harder problems", "ok",
    )  # fmt: skip


def _equal_groups(view: View) -> tuple[float, float]:
    """The share of groups with equal rewards, 0 while it is too early to tell; the mean reward."""
    shares = [figure(row, "frac_reward_zero_std", 0.0) for row in view.rows]
    reward = fmean(figure(row, "reward", 0.5) for row in view.rows)
    return fmean(shares) if len(shares) >= ENOUGH else 0.0, reward


def _left(view: View) -> Verdict | None:
    """A generator is not heard any more."""
    if not view.gone:
        return None
    one = len(view.gone) == 1
    sentence = f"{', '.join(view.gone)} {'is' if one else 'are'} gone, {len(view.fares)} still up"
    advice = f"restart {'it' if one else 'them'}"
    if not view.fares:
        return Verdict(sentence, advice, "bad")
    return Verdict(sentence, f"{advice}; the others go on", "warn")


def _unjudged(view: View) -> Verdict | None:
    """Groups that got no reward."""
    lost = {fare.name: view.growth(f"gen/{fare.name}/unjudged") for fare in view.fares}
    num_lost = sum(lost.values())
    share = num_lost / max(1.0, num_lost + view.num_groups)
    if share < LATE:
        return None
    most = max(lost, key=lost.__getitem__)
    return Verdict(
        f"{_percent(share)} of groups got no reward, most of them at {most}",
        "read its log; the reward fails, or takes longer than task.reward_timeout", "warn",
    )  # fmt: skip


def _late(view: View) -> Verdict | None:
    """Groups dropped because they were too old."""
    num_late = view.growth("dropped/stale")
    share = num_late / max(1.0, num_late + view.num_groups)
    if share < LATE:
        return None
    senders = [
        str(each.get("sender")).rpartition("/")[0]
        for each in view.events
        if each.get("event") == "drop"
        and each.get("outcome") == "stale"
        and figure(each, "time") >= figure(view.rows[0], "time")
    ]
    most = max(set(senders), key=lambda name: (senders.count(name), name), default="")
    whose = f", most of them from {most}" if most else ""
    return Verdict(
        f"{_percent(share)} of groups came too late and were dropped{whose}",
        "raise train.max_off_policy_steps, or take away the slowest generator", "warn",
    )  # fmt: skip


def _behind(view: View) -> Verdict | None:
    """A generator samples from old weights although there are newer ones."""
    told = [fare for fare in view.fares if math.isfinite(fare.step)]
    if not told:
        return None
    oldest = min(told, key=lambda fare: fare.step)
    steps = figure(view.rows[-1], "step") - oldest.step
    seconds = steps * view.step_seconds
    if steps < STALE_STEPS or seconds < STALE_SECONDS:
        return None
    return Verdict(
        f"{oldest.name} still samples from the weights of step {oldest.step:.0f}, "
        f"{steps:.0f} steps or {seconds:.0f} s old",
        "check its link to weights.dir: bin/doctor there", "warn",
    )  # fmt: skip


def _publishing(view: View) -> Verdict | None:
    """Publishing holds the trainer up, or cannot keep pace with it."""
    if (stall := view.share("time/publish")) >= STALLS:
        return Verdict(
            f"publishing holds the trainer up for {_percent(stall)} of its time",
            "put weights.dir on a faster disk, or raise train.batch_size for fewer versions",
            "warn",
        )
    spent = [
        figure(row, "weights/encode_seconds", 0.0) + figure(row, "weights/write_seconds", 0.0)
        for row in view.rows
    ]
    seconds = median(spent)
    if seconds < max(SATURATED_SECONDS, view.step_seconds):
        return None
    size = median(figure(row, "weights/bytes", 0.0) for row in view.rows)
    return Verdict(
        f"the disk or link of weights.dir is saturated: a version ({_size(size)}) takes "
        f"{seconds:.1f} s to publish, a step {view.step_seconds:.1f} s",
        "raise weights.keyframe_interval or weights.max_mbit_per_s, or take a faster weights.dir",
        "warn",
    )


def _reloading(view: View) -> Verdict | None:
    """A change of weights takes a generator long beside a step; it may leave versions out."""
    if not view.fares:
        return None
    slowest = max(view.fares, key=lambda fare: fare.reload_seconds)
    share = slowest.reload_seconds / max(1e-9, view.step_seconds)
    if share < WAITS:
        return None
    return Verdict(
        f"{slowest.name} takes {slowest.reload_seconds:.1f} s to change weights, a step "
        f"{view.step_seconds:.1f} s",
        "raise train.batch_size for fewer versions", "warn",
    )  # fmt: skip


def _journaling(view: View) -> Verdict | None:
    """The run's own disk is slow."""
    if (share := view.share("time/journal")) < STALLS:
        return None
    return Verdict(
        f"the disk of run.dir is saturated: the journal takes {_percent(share)} of the "
        "trainer's time",
        "move run.dir to a local disk", "warn",
    )  # fmt: skip


def _balance(view: View) -> Verdict:
    """Who waits for whom."""
    if len(view.rows) < ENOUGH:
        return Verdict("too early to say who waits for whom", "", "ok")
    if (found := _one_blocked(view)) is not None:
        return found
    waiting = view.waiting
    blocked = fmean(fare.blocked for fare in view.fares) if view.fares else 0.0
    queue = fmean(fare.queue for fare in view.fares) if view.fares else 0.0
    trainer, generators = _percent(waiting), _percent(blocked)
    if waiting >= WAITS and queue >= WAITS:
        return Verdict(
            f"the link to the trainer is saturated: generators wait {_percent(queue)} of their "
            f"time for room in their queue, the trainer {trainer} for rollouts",
            "raise wire.hwm, or put them on a faster network", "warn",
        )  # fmt: skip
    if waiting >= WAITS and blocked >= WAITS:
        return Verdict(
            f"they take turns: the trainer waits {trainer} of its time for rollouts, "
            f"generators {generators} for the trainer",
            "raise train.max_async_level", "warn",
        )  # fmt: skip
    if waiting >= WAITS:
        return _too_few_rollouts(view)
    if blocked >= WAITS:
        return _too_many_rollouts(view)
    return Verdict(
        f"balanced: the trainer waits {trainer} of its time for rollouts, "
        f"generators {generators} for the trainer", "", "ok",
    )  # fmt: skip


def _one_blocked(view: View) -> Verdict | None:
    """One generator alone is held up, which a mean of all would hide."""
    worst = max(view.fares, key=lambda fare: fare.blocked, default=None)
    if worst is None or len(view.fares) < 2 or worst.blocked < BLOCKED_ALONE:
        return None
    others = fmean(fare.blocked for fare in view.fares if fare is not worst)
    if others >= WAITS:
        return None
    return Verdict(
        f"{worst.name} alone is blocked {_percent(worst.blocked)} of its time {_why(worst)}, the "
        f"others {_percent(others)}; the trainer waits {_percent(view.waiting)} for rollouts",
        "check its link to the trainer: bin/doctor there"
        if _is_full(worst)
        else "raise train.max_async_level: it can do more than its share",
        "warn",
    )


def _too_few_rollouts(view: View) -> Verdict:
    sentence = f"the trainer waits {_percent(view.waiting)} of its time for rollouts"
    slowest = min(view.fares, key=lambda fare: fare.speed, default=None)
    typical = median(fare.speed for fare in view.fares) if view.fares else 0.0
    if slowest is not None and slowest.speed < SLOW * typical:
        sentence += (
            f"; {slowest.name} is slow, {slowest.tokens_per_s:.0f} of all "
            f"{sum(fare.tokens_per_s for fare in view.fares):.0f} tokens/s"
        )
    advice = "add a generator on another machine, or raise engine.slots"
    return Verdict(sentence, advice, "warn")


def _too_many_rollouts(view: View) -> Verdict:
    worst = max(view.fares, key=lambda fare: fare.blocked)
    return Verdict(
        f"the trainer is the bottleneck: {worst.name} is blocked {_percent(worst.blocked)} of its "
        f"time {_why(worst)}",
        "give the trainer a faster device or train.dtype bfloat16; fewer generators would do",
        "warn",
    )


def _is_full(fare: GeneratorStats) -> bool:
    """Whether it is blocked by its queue rather than by the trainer's pace."""
    return fare.queue > fare.blocked / 2


def _why(fare: GeneratorStats) -> str:
    return "on a full queue" if _is_full(fare) else "until the trainer needs more"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:.1f} GB"


# A generator that left is news for WINDOW steps only, so it hides no other finding for long.
FINDINGS: tuple[Callable[[View], Verdict | None], ...] = (
    _resumed, _stopped, _left, _no_signal, _unjudged, _late, _behind, _publishing, _reloading,
    _journaling, _solved, _balance,
)  # fmt: skip
