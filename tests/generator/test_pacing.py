"""Sampling pace: the decision for one generator, and whole runs with generators of unequal speed.

.venv/bin/python -m pytest tests/generator/test_pacing.py -m slow
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from paced_runs import LIMITS, RUNS, STEPS, paced

from peralta_zmq.generator.training_groups import SILENCE_SECONDS, SamplingPacer
from peralta_zmq.wire import Announcement, SenderProgress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A monotonic clock that tests advance."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def num_allowed(
    pacer: SamplingPacer,
    *,
    step: int = 0,
    num_generators: int = 1,
    num_starts: int = 1,
    **announced: Any,
) -> int:
    """Groups that may be started one after the other when none is pending; all are received.

    `num_starts` is the number of live incarnations of each generator.
    """
    senders = {f"g{n}/{start:016x}": SenderProgress() for n in range(num_generators)
               for start in range(num_starts)}  # fmt: skip
    announcement = Announcement("run", senders=senders, **announced)
    count = 0
    while count < 100 and pacer.may_start(
        announcement, step=step, num_pending=count, num_unreceived=0
    ):
        pacer.record_start()
        count += 1
    return count


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("level", "started_step", "groups"),
    [
        (0, 7, 16),  # the groups of the next step
        (0, 8, 0),  # on-policy: that step has begun, wait for its weights
        (1, 7, 32),  # the next step and the one after it
        (1, 8, 16),
        (1, 9, 0),
        (2, 7, 48),
        (1, 0, 32),  # announcements are lost and weights still arrive: no more than with them
    ],
)
def test_pacer_allows_groups_within_async_level(level: int, started_step: int, groups: int) -> None:
    pacer = SamplingPacer(16, name="g0", max_async_level=level)
    assert num_allowed(pacer, step=7, started_step=started_step) == groups


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("level", "weights", "started_step", "groups"),
    [
        (1, 8, 8, 128),  # steps 9 to 12 with the newest version, 13 to 16 with the one before
        (1, 8, 11, 80),
        (1, 8, 12, 64),  # the version of step 12 is due
        (1, 8, 16, 0),
        (2, 8, 16, 64),
        (1, 10, 16, 0),  # an additional version does not change the limit
        (1, 12, 16, 64),
    ],
)
def test_pacer_counts_weight_versions_of_several_steps(
    level: int, weights: int, started_step: int, groups: int
) -> None:
    pacer = SamplingPacer(16, name="g0", max_async_level=level, steps_per_version=4)
    assert num_allowed(pacer, step=weights, started_step=started_step) == min(100, groups)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("num_generators", "groups"), [(2, 8), (3, 6), (16, 1), (40, 1)])
def test_pacer_divides_a_step_among_generators(num_generators: int, groups: int) -> None:
    pacer = SamplingPacer(16, name="g0", max_async_level=0)
    assert num_allowed(pacer, num_generators=num_generators) == groups


@pytest.mark.usefixtures("clock")
def test_pacer_counts_the_incarnations_of_a_name_once() -> None:
    pacer = SamplingPacer(16, name="g0", max_async_level=0)
    assert num_allowed(pacer, num_generators=2, num_starts=17) == 8


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("name", "suppliers", "groups"),
    [
        ("g0", ["g0", "g1"], 8),  # of 16 live ones, only these have groups in the newest steps
        ("g7", ["g0", "g1", "g2"], 1),  # not a supplier yet, like others that may begin now
        ("g0", [], 1),  # before the first step
    ],
)
def test_supplier_counts_only_suppliers(name: str, suppliers: list[str], groups: int) -> None:
    pacer = SamplingPacer(16, name=name, max_async_level=0)
    counts = dict.fromkeys(suppliers, 1)
    assert num_allowed(pacer, num_generators=16, suppliers=counts) == groups


def test_pacer_gives_a_starved_or_silent_trainer_one_more_group(clock: list[float]) -> None:
    pacer = SamplingPacer(16, name="g0", max_async_level=1)
    clock[0] += 0.35
    assert num_allowed(pacer, started_step=2) == 0
    assert num_allowed(pacer, started_step=2, waiting=True) == 1
    clock[0] += SILENCE_SECONDS - 0.1
    assert num_allowed(pacer, started_step=2) == 0
    clock[0] += 0.2
    assert num_allowed(pacer, started_step=2) == 1


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("follows", "in_step", "groups"),
    [
        (False, 10, 4),  # the settings count, whatever a step consumed
        (True, 0, 4),  # before the first step
        (True, 10, 10),
    ],
)
def test_pacer_follows_the_groups_of_a_step(follows: bool, in_step: int, groups: int) -> None:
    pacer = SamplingPacer(4, name="g0", max_async_level=0, follow_step_size=follows)
    assert num_allowed(pacer, groups_in_step=in_step) == groups


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("num_generators", "kill"), RUNS)
def test_unequal_generators_stay_within_a_step_of_newest_weights(
    num_generators: int, kill: bool, tmp_path: Path
) -> None:
    run = paced(tmp_path, num_generators, kill=kill)
    print(run)
    assert run.ages.total() == 16 * STEPS
    assert run.paced_mean <= LIMITS["mean"]
    assert run.share_dropped < LIMITS["dropped"]
    assert run.longest_wait < 30
