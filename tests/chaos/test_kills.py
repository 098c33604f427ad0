"""SIGKILL at random moments and at every named place: nothing lost, nothing twice, nothing torn.

Rows 1, 2, 4 and 13 of the fault table.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping

import pytest
from field import REPO, Field, Program, chance, ended_within, until

from peralta_zmq.failpoints import VARIABLE

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

NUM_KILLS = 30
STEPS = ("--train.max-steps", "60")
ELSEWHERE = ("atomic_files.", "load.", "prune.")  # tests/weights/test_faults.py kills at these
IN_GENERATORS = ("generator.", "wire.send")
PLACES = sorted(
    {
        place
        for file in (REPO / "peralta_zmq").rglob("*.py")
        for place in re.findall(r'failpoint\("([\w.]+)"\)', file.read_text("utf-8"))
        if not place.startswith(ELSEWHERE)
    }
)


def num_starts(field: Field) -> int:
    return sum(row["event"] in ("start", "resume") for row in field.events)


def is_as_published(field: Field) -> bool:
    """Whether a replay of the journal, killed by nobody, ends with the weights of this run."""
    last = field.replay()[-1]
    return last.startswith("step=60 ") and last.endswith("  as published")


def test_a_trainer_killed_many_times_ends_where_an_unkilled_one_does(field: Field) -> None:
    random, kills, takes = chance(), 0, 0.0  # seconds that a start takes
    generators = [field.generator(name) for name in ("ann", "bob")]
    while kills < NUM_KILLS and field.step < 50:
        starts, trainer = num_starts(field), field.trainer(*STEPS)
        begun, longest = time.monotonic(), 0.4
        if not takes or random.random() < 0.7:
            until(lambda starts=starts: num_starts(field) > starts, trainer, *generators)
            takes = time.monotonic() - begun
            target = field.step + random.choice([0, 0, 1, 1])
            until(lambda target=target: field.step >= target, trainer, *generators)
        else:  # it may be killed in the second half of its start: reading, replaying, binding
            longest = takes / 2
            assert not ended_within(trainer, takes / 2)
        if ended_within(trainer, random.uniform(0.0, longest)):
            assert trainer.ends() == 0, trainer.printed
            break
        trainer.kill()
        kills += 1
    last = field.trainer(*STEPS)
    assert last.ends(timeout=120) == 0, last.printed
    print(f"kills: {kills}")
    assert kills >= 10
    assert "in use" not in last.printed  # the port was free for each of them
    for each in generators:
        assert each.ends(timeout=30) == 0, each.printed
    assert field.broken() == {}
    assert is_as_published(field)


def test_generators_killed_30_times_in_the_middle_of_sending_tear_nothing(field: Field) -> None:
    random, kills, target = chance(), 0, 20
    trainer = field.trainer("--train.max-steps", str(target))
    names = ("ann", "bob", "cid")
    running = {name: field.generator(name) for name in names}
    made = dict.fromkeys(names, 0)
    while kills < NUM_KILLS:
        if not trainer.alive:  # complete: there is more to do
            assert trainer.ends() == 0, trainer.printed
            target = field.step + 20
            trainer = field.trainer("--train.max-steps", str(target))
        name = random.choice(names)
        generator = running[name]
        if not generator.alive:
            assert generator.ends() in (0, -signal.SIGKILL), generator.printed
            running[name] = field.generator(name)
        elif (count := generator.printed.count("made group=")) > made[name]:
            made[name] = count
            if not ended_within(generator, random.uniform(0.0, 0.05)):
                generator.kill()
                kills += 1
    running = {name: field.generator(name) for name in names}
    assert trainer.ends(timeout=120) == 0, trainer.printed
    assert all(row["dropped/invalid"] == 0 for row in field.rows)
    assert field.broken(max_steps=target) == {}


def test_whoever_dies_at_a_named_place_ledger_and_weights_agree(field: Field) -> None:
    settings = (*STEPS, "--checkpoint.interval", "2")
    running: dict[str, Program] = {}

    def start(who: str, environment: Mapping[str, str]) -> None:
        if who in running:
            running[who].kill()
        running[who] = (
            field.trainer(*settings, environment=environment) if who == "trainer"
            else field.generator("ann", environment=environment)
        )  # fmt: skip

    def dies_at(place: str) -> bool:
        """Whether it comes there, while the other one goes on as it was."""
        who, other = "trainer", "generator"
        if place.startswith(IN_GENERATORS):
            who, other = other, who
        starts, target = num_starts(field) + (who == "trainer"), field.step + 4
        start(who, {VARIABLE: place})
        if other not in running or not running[other].alive:
            start(other, {})
        until(
            lambda: (
                not running[who].alive or (num_starts(field) >= starts and field.step >= target)
            ),
            running[other],
        )
        if running[who].alive:
            running[who].kill()
            return False
        assert running[who].ends() == -signal.SIGKILL, running[who].printed[-3000:]
        return True

    reached = [place for place in PLACES if field.step < 50 and dies_at(place)]
    for who in ("trainer", "generator"):
        start(who, {})
    trainer, generator = running["trainer"], running["generator"]
    assert trainer.ends(timeout=120) == 0, trainer.printed
    assert generator.ends(timeout=30) == 0, generator.printed
    print(f"reached: {reached}")
    assert set(PLACES) - set(reached) <= {"publish.identity"}
    assert field.broken() == {}
    assert is_as_published(field)
