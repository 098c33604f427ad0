"""Verdicts on synthetic runs: bottlenecks, missing generators, stalls."""

import math
from collections.abc import Sequence

import pytest

from peralta_zmq.observe.metrics import Row
from peralta_zmq.observe.run_state import format_duration, seconds_left
from peralta_zmq.observe.verdict import Verdict, verdict

NOW = 5000.0  # unix seconds; step n ends at 1000 + 2 n


def gen(name: str, **kinds: float) -> Row:
    fields = {"tokens_per_s": 400.0, "blocked_frac": 0.05, "reload_s": 0.01, "unscored": 0} | kinds
    return {f"gen/{name}/{kind}": value for kind, value in fields.items()}


def run(num_rows: int = 10, *generators: Row, **fields: object) -> list[Row]:
    """Steps of 2 s with 8 groups each and little waiting."""
    rows: list[Row] = []
    for step in range(1, num_rows + 1):
        row: Row = {
            "step": step, "time": 1000.0 + 2 * step, "step_time": 2.0, "reward": 0.5,
            "frac_reward_zero_std": 0.1, "time/wait_for_batch": 0.16, "time/journal": 0.04,
            "time/publish": 0.01, "weights/encode_seconds": 0.1, "weights/write_seconds": 0.1,
            "weights/bytes": 2_000_000, "dropped/stale": 0, "num_groups": 8,
        }  # fmt: skip
        for generator in generators or (gen("a"), gen("b")):
            row |= generator
        for name in {key.split("/")[1] for key in row if key.startswith("gen/")}:
            row |= {f"gen/{name}/step": step - 1} | {
                key: value for key, value in row.items() if key == f"gen/{name}/step"
            }
        rows.append(row | {name.replace("__", "/"): value for name, value in fields.items()})
    return rows


def growing(rows: list[Row], **per_row: float) -> list[Row]:
    """The same rows with counts that grow by these amounts per row."""
    return [
        row | {key.replace("__", "/"): count * at for key, count in per_row.items()}
        for at, row in enumerate(rows)
    ]


def without(rows: list[Row], name: str, *, last: int) -> list[Row]:
    """`name` does not report in the last rows."""
    kept = [{k: v for k, v in row.items() if f"gen/{name}/" not in k} for row in rows[-last:]]
    return [*rows[:-last], *kept]


def joined(name: str, moment: float, *, incarnation: str = "1") -> Row:
    return {"event": "join", "generator": name, "incarnation": incarnation, "time": moment}


def left(name: str, moment: float, *, incarnation: str = "1") -> Row:
    return {"event": "leave", "generator": name, "incarnation": incarnation, "time": moment}


def unreadable(name: str, reason: str) -> Row:
    return {"event": "store_error", "generator": name, "reason": reason, "time": 1001.0}


START: Row = {"event": "start", "time": 1000.0, "step": 0}
STALE_DROPS: list[Row] = [  # those of "a" are more than a minute older than the rows that count
    {"event": "drop", "outcome": "stale", "sender": f"{name}/00ff", "time": moment, "count": count}
    for name, moment, count in (
        ("a", 941.9, 99),
        ("b", 942.0, 1),
        ("b", 1004.0, 3),
        ("c", 1005.0, 2),
    )
]
RUNS: dict[str, tuple[Sequence[Row], Sequence[Row], float | None, str, str]] = {
    # name: rows, events, now, level, sentence and advice
    # 0.16 s of waiting in each step of 2 s are 8%
    "balanced": (run(), [], None, "ok",
        "balanced: the trainer waits 8% of its time for rollouts, generators 5% for the trainer"),
    "too few rollouts": (run(time__wait_for_batch=1.24), [], None, "warn",
        "the trainer waits 62% of its time for rollouts; add a generator on another machine, or "
        "raise engine.slots"),
    "slow generator among three": (run(10, gen("a"), gen("b"), gen("nas", tokens_per_s=40.0),
        time__wait_for_batch=1.24), [], None, "warn",
        "the trainer waits 62% of its time for rollouts; nas is slow: 40 of 840 tokens/s; add a "
        "generator on another machine, or raise engine.slots"),
    "generator without a finished group is not slow": (run(10, gen("a"), gen("b"),
        gen("own", tokens_per_s=0.0), time__wait_for_batch=1.24), [], None, "warn",
        "the trainer waits 62% of its time for rollouts; add a generator on another machine, or "
        "raise engine.slots"),
    "blocked generator is not slow": (run(10, gen("a"), gen("b"), gen("c", tokens_per_s=40.0,
        blocked_frac=0.9)), [], None, "warn",
        "only c is blocked, 90% of its time until the trainer catches up, the others 5%; the "
        "trainer waits 8% for rollouts; raise train.max_async_level: c has spare capacity"),
    # 90% of one are 22% of all four
    "full queue among four": (run(10, gen("a", blocked_frac=0.0), gen("b", blocked_frac=0.0),
        gen("c", blocked_frac=0.0), gen("nas", blocked_frac=0.9, queue_frac=0.9)), [], None, "warn",
        "only nas is blocked, 90% of its time by a full send queue, the others 0%; the trainer "
        "waits 8% for rollouts; check its link to the trainer with bin/doctor on that machine"),
    "all blocked": (run(10, gen("a", blocked_frac=0.6), gen("b", blocked_frac=0.3)), [], None,
        "warn",
        "the trainer is the bottleneck: a is blocked 60% of its time until the trainer catches "
        "up; use a faster device for the trainer; fewer generators suffice"),
    "full queue": (run(10, gen("a", blocked_frac=0.6, queue_frac=0.5)), [], None, "warn",
        "the trainer is the bottleneck: a is blocked 60% of its time by a full send queue; use a "
        "faster device for the trainer"),
    "both wait": (run(10, gen("a", blocked_frac=0.4), time__wait_for_batch=0.6), [], None, "warn",
        "trainer and generators alternate: the trainer waits 30% of its time for rollouts, "
        "generators 40% for the trainer; raise train.max_async_level"),
    "both wait and the queue is full": (run(10, gen("a", blocked_frac=0.4, queue_frac=0.35),
        time__wait_for_batch=0.6), [], None, "warn",
        "the link to the trainer is saturated: generators are blocked 35% of their time by a full "
        "send queue, the trainer waits 30% for rollouts; use a faster network"),
    # weights
    "publishing blocks": (run(time__publish=0.5), [], None, "warn",
        "publishing blocks the trainer 25% of its time; put weights.dir on a faster disk, or "
        "raise train.batch_size for fewer versions"),
    "publishing lags": (run(weights__write_seconds=8.1, weights__bytes=1300000000), [], None,
        "warn",
        "the disk or link of weights.dir is saturated: a version (1.3 GB) takes 8.2 s to publish, "
        "a step 2.0 s; raise weights.interval or weights.max_mbit_per_s, or use a faster "
        "weights.dir"),
    "reloading dominates": (run(10, gen("a"), gen("nas", reload_s=0.8)), [], None, "warn",
        "nas takes 0.8 s to load new weights, a step takes 2.0 s; raise train.batch_size for "
        "fewer versions"),
    # more than two steps, but 0.0 s when rounded
    "reloading is short": (run(10, gen("a", reload_s=0.049), step_time=0.02,
        time__wait_for_batch=0.0, time__journal=0.0, time__publish=0.0), [], None, "ok",
        "balanced: the trainer waits 0% of its time for rollouts, generators 5% for the trainer"),
    "steps are shorter than reloading": (run(10, gen("a", reload_s=0.8), step_time=0.04,
        time__wait_for_batch=0.0, time__journal=0.0, time__publish=0.0), [], None, "warn",
        "a takes 0.8 s to load new weights, a step takes 0.04 s; raise train.batch_size for fewer "
        "versions"),
    "journal disk saturated": (run(time__wait_for_batch=0.1, time__journal=0.8), [], None, "warn",
        "the disk of run.dir is saturated: the journal takes 40% of the trainer's time; move "
        "run.dir to a local disk"),
    "old weights": (run(10, gen("a"), gen("nas", step=4)), [], None, "warn",
        "nas still samples from the weights of step 4, which are 6 steps or 12 s old; check its "
        "link to weights.dir with bin/doctor on that machine"),
    "unreadable weights": (run(10, gen("a"), gen("nas", step=4)),
        [START, joined("a", 1000.0), joined("nas", 1000.0), unreadable("nas", "/nas is denied"),
        *STALE_DROPS], None, "bad", "nas cannot read new weights: /nas is denied; bin/doctor on "
        "that machine checks the folder"),
    "readable weights again": (run(), [START, joined("a", 1000.0), unreadable("a", "denied"),
        unreadable("a", "")], None, "ok",
        "balanced: the trainer waits 8% of its time for rollouts, generators 5% for the trainer"),
    "unreadable weights before the first step": ([], [START, joined("nas", 1000.0),
        unreadable("nas", "/nas is denied")], 1010.0, "bad", "nas cannot read new weights: /nas is "
        "denied; bin/doctor on that machine checks the folder"),
    "old version": (run(10, gen("a"), gen("nas", step=4), weights__step=6), [], None, "ok",
        "balanced: the trainer waits 8% of its time for rollouts, generators 5% for the trainer"),
    # 9 rows after the first: 9 groups dropped, 72 trained
    "stale groups of one generator": (growing(run(10, gen("a")), dropped__stale=1), [], None,
        "warn",
        "11% of groups were dropped as stale; raise train.max_off_policy_steps"),
    "stale groups": (growing(run(), dropped__stale=1), STALE_DROPS, None, "warn",
        "11% of groups were dropped as stale, most of them from b; raise "
        "train.max_off_policy_steps, or remove the slowest generator"),
    "no reward": (growing(run(), gen__b__unscored=4), [], None, "warn",
        "33% of groups got no reward, most of them on b; check its log: the reward function fails "
        "or exceeds task.reward_timeout"),
    # the signal
    "no signal at a low reward in twenty steps after the first": (run(21, frac_reward_zero_std=1.0,
        reward=0.05), [START], None, "bad",
        "no learning signal: 100% of groups have equal rewards, mean reward 0.05; check the "
        "reward function; if it is right, use easier problems or raise sampling.num_generations"),
    "no signal in the first steps": (run(20, frac_reward_zero_std=1.0, reward=0.05), [START], None,
        "warn",
        "little learning signal: 100% of groups have equal rewards, mean reward 0.05; check the "
        "reward function; if it is right, use easier problems or raise sampling.num_generations"),
    "little signal": (run(frac_reward_zero_std=0.85), [], None, "warn",
        "little learning signal: 85% of groups have equal rewards, mean reward 0.50; raise "
        "sampling.temperature or sampling.num_generations"),
    "solved": (run(frac_reward_zero_std=0.95, reward=0.98), [], None, "ok",
        "the task is solved: mean reward 0.98, 95% of groups have equal rewards; balanced: the "
        "trainer waits 8% of its time for rollouts, generators 5% for the trainer; stop here, or "
        "train on harder problems"),
    "solved, and publishing blocks": (run(frac_reward_zero_std=0.95, reward=0.98,
        time__publish=0.5), [], None, "warn",
        "publishing blocks the trainer 25% of its time; put weights.dir on a faster disk, or "
        "raise train.batch_size for fewer versions"),
    "rounding": (run(weights__moved=0.06, mismatch_kl=0.004), [], None, "warn",
        "updates are lost in rounding: 6% of the move of the master weights is in the published "
        "weights; set train.master_noise to true in a new run"),
    "rounding, and the trainer computes with finer weights": (
        run(weights__moved=0.2, mismatch_kl=0.15), [], None, "warn",
        "updates are lost in rounding: 20% of the move of the master weights is in the published "
        "weights; the trainer computes with finer weights than these, mismatch_kl 0.15; "
        "set train.master_noise to true in a new run"),
    "no rounding": (run(weights__moved=0.9, mismatch_kl=0.15), [], None, "ok",
        "balanced: the trainer waits 8% of its time for rollouts, generators 5% for the trainer"),
    # generators that are gone
    "one is not in the last row": (without(run(), "b", last=2), [], None, "warn",
        "b is gone, 1 still up; restart it; the others continue"),
    "one left since the last row": (without(run(10, gen("a"), gen("b"), gen("c")), "b", last=1),
        [{"event": "leave", "generator": "c", "incarnation": "2", "time": 1030.0}], None, "warn",
        "b, c are gone, 1 still up; restart them; the others continue"),
    "all are gone": (without(run(10, gen("a")), "a", last=1), [], None, "bad",
        "a is gone, 0 still up; restart it"),
    "one is gone and there is little signal": (without(run(frac_reward_zero_std=0.85), "b", last=2),
        [], None, "warn", "b is gone, 1 still up; restart it; the others continue"),
    "one is gone and there is no signal": (without(run(20, frac_reward_zero_std=1.0, reward=0.05),
        "b", last=2), [], None, "bad",
        "no learning signal: 100% of groups have equal rewards, mean reward 0.05; check the "
        "reward function; if it is right, use easier problems or raise sampling.num_generations"),
    "no step and no generator up": (without(run(10, gen("a")), "a", last=1), [], 1110.0, "bad",
        "no step for 1m30s: no generator is up, a left; start one: bin/generator @ CONFIG"),
    "no step though a generator is up": (run(), [START], 1110.0, "bad",
        "no step for 1m30s; check the newest event and the last lines of the trainer's log"),
    # few or no steps
    "nothing": ([], [], NOW, "ok",
        "waiting for the first generator; start one: bin/generator @ CONFIG"),
    "run stopped before the first step": ([], [START, START | {"event": "stop"}], NOW, "ok",
        "waiting for the first step"),
    "no join": ([], [START], 1045.0, "bad",
        "no step yet: no generator has joined in 45s; start one: bin/generator @ CONFIG"),
    "only generator left": ([], [START, joined("a", 1010.0), left("a", 1041.0)], 1042.0, "bad",
        "no step yet: a left; start one: bin/generator @ CONFIG"),
    "one of two left": ([], [START, joined("a", 1010.0), joined("b", 1010.0), left("a", 1041.0)],
        1042.0, "ok", "waiting for the first step; b joined"),
    "join in an earlier session": ([], [START, joined("a", 1010.0), START | {"event": "resume",
        "time": 2000.0}], 2045.0, "bad",
        "no step yet: no generator has joined in 45s; start one: bin/generator @ CONFIG"),
    "two joined, no step": ([], [START, joined("b", 1010.0), joined("a", 1011.0)], 1160.0, "warn",
        "no step yet: a, b joined 2m30s ago; the first step of a large model takes long; "
        "otherwise check the last lines of the trainer's and the generators' logs"),
    "no join since the resume": (run(), [START, joined("a", 1001.0), START | {"event": "resume",
        "time": 2000.0}], 2045.0, "bad",
        "no step since the resume: no generator has joined in 45s; start one: bin/generator @ "
        "CONFIG"),
    "all left since the resume": (run(), [START, START | {"event": "resume", "time": 2000.0},
        joined("a", 2001.0), left("a", 2031.0)], 2032.0, "bad",
        "no step since the resume: a left; start one: bin/generator @ CONFIG"),
    "the untrained model is evaluated": ([], [START, {"event": "evaluate", "time": 1001.0, "step":
        0}], 4000.0, "ok", "evaluating the untrained model before the first step"),
    "the journal is replayed": ([], [START, {"event": "replay", "time": 2000.0}], 4000.0, "ok",
        "replaying the journal of the earlier session"),
    "the journal of recorded steps is replayed": (run(), [START, joined("a", 1001.0), {"event":
        "replay", "time": 2000.0}], 4000.0, "ok", "replaying the journal of the earlier session"),
    "no generator yet since the resume": (run(), [START, joined("a", 1001.0), START | {"event":
        "resume", "time": 2000.0}], 2010.0, "ok",
        "waiting for a generator since the resume; start one: bin/generator @ CONFIG"),
    "no step yet since the resume": (run(), [START, START | {"event": "resume", "time": 2000.0},
        joined("a", 2001.0)], 2010.0, "ok",
        "waiting for the first step since the resume; a joined"),
    "run stopped during the evaluation": ([], [START, {"event": "evaluate", "time": 1001.0},
        {"event": "stop", "time": 1002.0}], 4000.0, "ok", "waiting for the first step"),
    "no join after the evaluation": ([], [START, {"event": "evaluate", "time": 1001.0}, {"event":
        "evaluated", "time": 3000.0}], 3045.0, "bad",
        "no step yet: no generator has joined in 45s; start one: bin/generator @ CONFIG"),
    "two steps": (run(2), [], None, "ok", "too few steps to name a bottleneck"),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_verdict_matches_run(name: str) -> None:
    rows, events, now, level, text = RUNS[name]
    found = verdict(rows, events, now=now)
    assert (found.level, found.text) == (level, text)


BALANCED = verdict(run())


def test_verdict_uses_the_newest_twenty_trained_rows() -> None:
    assert verdict([*run(30, time__wait_for_batch=2.0), *run(20)]) == BALANCED
    assert verdict([*run(20), *run(20, time__wait_for_batch=2.0)]).level == "warn"
    replayed = run(10, step_time=0.0, time__wait_for_batch=2.0)
    assert verdict([*run(), *replayed]) == BALANCED


def test_verdict_ignores_the_first_step_of_a_session() -> None:
    rows = run(4)
    rows[0] |= {"step_time": 60.0, "time/wait_for_batch": 58.0}
    assert verdict(rows).level == "warn"
    assert verdict(rows, [START]) == BALANCED


def test_restarted_generator_is_not_gone() -> None:
    rejoined, leave = joined("b", 1019.0, incarnation="2"), left("b", 1020.0)
    assert verdict(run(), [joined("b", 1019.0), rejoined, leave]) == BALANCED
    ended = verdict(run(), [rejoined, leave | {"incarnation": "2"}])
    assert ended.sentence == "b is gone, 1 still up"


def test_generator_that_left_before_the_window_is_ignored() -> None:
    assert verdict(run(), [left("c", 900.0)]) == BALANCED


COMPLETE = Verdict("the run is complete: mean reward 0.50 in its last 9 steps", "", "ok")


@pytest.mark.parametrize(("end", "expected"), [("stop", BALANCED), ("complete", COMPLETE)])
def test_ended_run_is_not_stalled_and_has_no_gone_generators(end: str, expected: Verdict) -> None:
    ended: Row = {"event": end, "time": 1021.0}
    assert verdict(without(run(), "b", last=2), [START, ended]) == expected
    assert verdict(run(), [START, ended], now=NOW) == expected
    assert verdict(run(), [START, ended, START | {"event": "resume"}], now=NOW).level == "bad"


@pytest.mark.parametrize("tuned", [
    {"time__wait_for_batch": 1.24}, {"time__publish": 0.5}, {"frac_reward_zero_std": 0.85},
    {"frac_reward_zero_std": 0.95, "reward": 0.98},
])  # fmt: skip
def test_complete_run_gets_no_advice_on_tuning(tuned: dict[str, float]) -> None:
    rows = run(**tuned)
    assert verdict(rows).advice
    found = verdict(rows, [START, {"event": "complete", "time": 1021.0}])
    assert (found.advice, found.level) == ("", "ok") and found.sentence.startswith("the run is com")


def test_complete_run_that_hardly_ever_got_a_reward_names_the_fault() -> None:
    """As after thirty steps on rows that are too hard: 92 of 96 groups had equal rewards."""
    found = verdict(
        run(frac_reward_zero_std=0.96, reward=0.02),
        [START, {"event": "complete", "time": 1021.0}],
    )
    assert found == Verdict(
        "little learning signal: 96% of groups have equal rewards, mean reward 0.02",
        "check the reward function; if it is right, use easier problems or raise "
        "sampling.num_generations",
        "bad",
    )


def test_run_is_not_stalled_during_an_evaluation() -> None:
    begin: Row = {"event": "evaluate", "time": 1021.0, "step": 10}
    assert verdict(run(), [START, begin], now=NOW) == BALANCED
    done: Row = {"event": "evaluated", "time": NOW, "step": 10}
    assert verdict(run(), [START, begin, done], now=NOW + 29.0) == BALANCED
    assert verdict(run(), [START, begin, done], now=NOW + 31.0).sentence == "no step for 31s"
    resumed = START | {"event": "resume", "time": NOW}
    assert verdict(run(), [START, begin, resumed], now=NOW + 31.0).level == "bad"


def test_stall_limit_is_thirty_seconds_or_ten_steps() -> None:
    assert verdict(run(), now=1049.0) == BALANCED
    assert verdict(run(), now=1051.0).level == "bad"
    slow = run(step_time=60.0)
    assert verdict(slow, now=1600.0).level == "ok"
    assert verdict(slow, now=1630.0).level == "bad"


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_null_and_non_finite_numbers_count_as_absent(value: float | None) -> None:
    empty: Row = {"step": 1, "step_time": 1.0, "reward": value, "gen/a/tokens_per_s": value}
    assert verdict([empty] * 5).level == "ok"
    for key in run()[0]:
        rows, without_it = run(), run()
        rows[4][key] = value
        del without_it[4][key]
        assert verdict(rows, [START], now=1021.0) == verdict(without_it, [START], now=1021.0)


@pytest.mark.parametrize("value", [5e307, 1.7e308])
def test_verdict_is_possible_if_sums_of_numbers_overflow(value: float) -> None:
    rows = run(3, *(gen(name, queue_frac=0.0) for name in "abcde"))
    for metric in {key.rpartition("/")[2] for key in rows[0]}:
        keys = [key for key in rows[0] if key.rpartition("/")[2] == metric]
        assert verdict([row | dict.fromkeys(keys, value) for row in rows], now=1021.0).sentence


def test_eta_is_not_negative_after_a_clock_change() -> None:
    rows = run(5)
    rows[-1]["time"] = float(str(rows[-1]["time"])) - 86_400
    assert seconds_left(rows, 10.0) == 20.0  # as the newest step took


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.4, "59s"), (60, "1m00s"), (3599, "59m59s"), (3720, "1h02m")],
)
def test_format_duration_is_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
