"""Link failures, suspended programs, clock jumps, disks that fail, few file descriptors.

See the fault table in docs/reliability.md.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from real_programs import Program, RealRun, ended_within, skip_without_mounting, until
from sample_data import resident_bytes
from sockets import hello

from peralta_zmq.config.programs import raise_open_files_limit
from tools.link_proxy import LinkProxy, free_ports
from tools.run_history import LOADED

FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
chaos = pytest.mark.chaos
pytestmark = pytest.mark.timeout(240)


def end_well(run: RealRun, trainer: Program, *generators: Program) -> None:
    """All programs end by themselves, and the promises hold."""
    assert trainer.wait(timeout=120) == 0, trainer.printed
    for each in generators:
        assert each.wait(timeout=30) == 0, each.printed
    assert run.broken() == {}


@chaos  # in `make test` by tests/wire/test_faults.py, for a sender and a receiver
def test_link_failure_is_survived_without_action(run: RealRun) -> None:
    cuts = (8, 60)
    with LinkProxy(run.port) as link:
        trainer = run.trainer("--train.max-steps", str(10 * len(cuts)))
        generator = run.generator("ann", "--wire.port", str(link.port))
        until(lambda: run.step >= 3, trainer, generator)
        for seconds in cuts:
            link.cut()
            assert not ended_within(trainer, seconds)  # the trainer keeps waiting
            step = run.step
            link.restore()
            restored = time.monotonic()
            until(lambda step=step: run.step > step, trainer, generator)
            assert time.monotonic() - restored < 10
        end_well(run, trainer, generator)


@chaos
def test_groups_lost_by_a_reset_link_are_sent_again(run: RealRun) -> None:
    with LinkProxy(run.port) as link:
        trainer = run.trainer("--train.max-steps", "30")
        generator = run.generator("ann", "--wire.port", str(link.port))
        seconds: list[float] = []
        for _ in range(8):
            step = run.step
            until(lambda step=step: run.step > step, trainer, generator)
            step, begun = run.step, time.monotonic()
            link.reset()
            until(
                lambda step=step: run.step > step + 1, trainer, generator
            )  # needs groups sent after the reset
            seconds.append(time.monotonic() - begun)
        assert max(seconds) < 10, seconds
        end_well(run, trainer, generator)


@chaos
def test_trainer_stopped_for_10_seconds_loses_nothing(run: RealRun) -> None:
    trainer = run.trainer("--train.max-steps", "12")
    generators = [run.generator(name) for name in ("ann", "bob")]
    until(lambda: run.step >= 3, trainer, *generators)
    trainer.signal(signal.SIGSTOP)
    assert not any(ended_within(each, 5) for each in generators)
    trainer.signal(signal.SIGCONT)
    end_well(run, trainer, *generators)


@chaos
def test_fast_generators_of_a_frozen_trainer_keep_pace_and_memory(run: RealRun) -> None:
    level, steps = 1, ("--train.max-steps", "10")  # of 4 groups each
    pace = ("--train.max-async-level", str(level))
    trainer = run.trainer(*steps, *pace)
    generators = [run.generator(f"g{number}", *pace) for number in range(5)]
    until(lambda: run.step >= 3 and all(map(num_made, generators)), trainer, *generators)
    trainer.signal(signal.SIGSTOP)
    made = list(map(num_made, generators))
    memory = [resident_bytes(each.process.pid) for each in generators]
    assert not ended_within(generators[0], 8)
    in_flight = [num_made(each) - count for each, count in zip(generators, made, strict=True)]
    grown = [resident_bytes(each.process.pid) - size
             for each, size in zip(generators, memory, strict=True)]  # fmt: skip
    # A step takes less than one group of each; one more is accepted if the trainer was waiting.
    assert max(in_flight) <= (level + 1) + 1, in_flight
    assert max(grown) < 16 << 20, grown
    trainer.signal(signal.SIGCONT)
    end_well(run, trainer, *generators)


def num_made(generator: Program) -> int:
    """Groups made so far, from the log."""
    return generator.printed.count("made group=")


@chaos
def test_generator_stopped_for_many_steps_reloads_once(run: RealRun) -> None:
    trainer = run.trainer("--train.max-steps", "20", "--weights.keep-last", "20")
    awake, sleeper = run.generator("ann"), run.generator("bob")
    until(lambda: "made group=" in sleeper.printed and run.step >= 2, trainer, awake, sleeper)
    sleeper.signal(signal.SIGSTOP)
    before = LOADED.findall(sleeper.printed)
    until(lambda: run.step >= int(before[-1][1]) + 7, trainer, awake)
    step = run.step
    sleeper.signal(signal.SIGCONT)
    end_well(run, trainer, awake, sleeper)
    first = LOADED.findall(sleeper.printed)[len(before) :][
        :2
    ]  # the first may have been fetched before
    assert int(first[-1][1]) >= step - 1  # the newest may still be in writing


@chaos
@pytest.mark.skipif(FAKETIME is None, reason="no faketime on this machine")
def test_clock_jumps_of_a_day_have_no_effect(run: RealRun, tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text("+1d\n")
    faked = {"LD_PRELOAD": str(FAKETIME), "DONT_FAKE_MONOTONIC": "1"}
    behind = {**faked, "FAKETIME": "-1d"}
    jumps = {**faked, "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1"}
    trainer = run.trainer("--train.max-steps", "12", environment=jumps)
    generator = run.generator("ann", environment=behind)
    until(lambda: run.step >= 4, trainer, generator)
    clock.write_text("-1d\n")
    until(lambda: run.step >= 8, trainer, generator)
    clock.write_text("+1d\n")
    end_well(run, trainer, generator)
    times = [float(str(row["time"])) for row in run.rows]
    assert max(times) - min(times) > 86_400


@chaos
def test_full_disk_for_logs_stops_no_program(run: RealRun) -> None:
    full = 'exec "$@" >/dev/full 2>&1'
    trainer = run.trainer("--train.max-steps", "4", shell=full)
    generator = run.generator("ann", shell=full)
    assert trainer.wait(timeout=120) == 0
    assert generator.wait(timeout=30) == 0
    assert run.step == 4


@chaos
def test_weights_folder_that_returns_has_a_new_version_within_10_s(run: RealRun) -> None:
    trainer = run.trainer("--train.max-steps", "60")
    generator = run.generator("ann")
    until(lambda: run.step >= 3, trainer, generator)
    weights, away = run.folder / "weights", run.folder / "away"
    for seconds in (20, 27):
        weights.rename(away)
        assert not ended_within(trainer, seconds)
        before = set(away.glob("step_*"))
        away.rename(weights)
        returned = time.monotonic()
        until(lambda old=before: {away / p.name for p in weights.glob("step_*")} - old, trainer)
        assert time.monotonic() - returned < 10
    end_well(run, trainer, generator)


ON_A_DISK = 'mount -t tmpfs -o size=64m tmpfs "$0" && exec "$@"'


@chaos
@pytest.mark.parametrize("fault", ["read-only", "full"])
def test_trainer_killed_while_its_weights_disk_fails_waits_and_continues(
    run: RealRun, tmp_path: Path, fault: str
) -> None:
    disk = tmp_path / "nas"
    disk.mkdir()
    mounted = f"exec unshare --map-root-user --mount /bin/sh -c '{ON_A_DISK}' {disk} \"$@\""
    skip_without_mounting()
    steps = ("--train.max-steps", "12")
    lan = run.start("lan", "--weights.dir", str(disk), *steps, log="lan", shell=mounted)
    until(lambda: run.step >= 3, lan)

    def on_disk(command: str) -> bool:
        enter = ["nsenter", "--user", "--mount", "--target", str(lan.process.pid)]
        return subprocess.run([*enter, "/bin/sh", "-c", command], check=False).returncode == 0

    def is_begun() -> bool:  # not while a file is being written
        return on_disk(f"mount -o remount,ro {disk}")

    until(is_begun, lan)
    (trainer,) = (each for each in psutil.Process(lan.process.pid).children()
                  if any(word.endswith("bin/trainer") for word in each.cmdline()))  # fmt: skip
    if fault == "full":
        trainer.suspend()  # or it makes room by removing a version that it cannot complete
        assert on_disk(f"mount -o remount,rw {disk}")
        on_disk(f"cat /dev/zero > {disk}/filler")
    trainer.kill()
    until(lambda: "weights folder" in lan.printed and ". Waiting" in lan.printed, lan)
    assert not ended_within(lan, 3)
    assert on_disk(f"mount -o remount,rw {disk}; rm -f {disk}/filler")
    assert lan.wait(timeout=120) == 0, lan.printed
    assert len(run.rows) == 12


FEW = 'ulimit -n 64; exec "$@"'


@chaos
def test_run_with_64_descriptors_completes(run: RealRun) -> None:
    trainer = run.trainer("--train.max-steps", "4", shell=FEW)
    generator = run.generator("ann", shell=FEW)
    end_well(run, trainer, generator)


@chaos
def test_trainer_without_a_free_descriptor_reports_it_and_recovers(run: RealRun) -> None:
    trainer = run.trainer("--train.max-steps", "12", shell=FEW)
    generator = run.generator("ann")
    until(lambda: run.step >= 3, trainer, generator)
    with ExitStack() as stack:
        for _ in range(90):  # more than it can accept, fewer than the kernel keeps for it
            stranger = socket.create_connection(("127.0.0.1", run.port), timeout=30)
            stack.enter_context(stranger).sendall(hello("PUSH"))
        until(lambda: num_descriptors(trainer) == 64, trainer, generator)
        without = WITHOUT.replace("PORT", str(run.port))
        until(lambda: re.search(without, trainer.printed), trainer, generator)
        step = run.step
        assert not ended_within(trainer, 3)
        assert run.step == step  # none is taken whose groups are not in the journal
    end_well(run, trainer, generator)


WITHOUT = (
    r"cannot write .*: Too many open files: the limit of this process is 64, and \d+ are "
    r"connections \(\d+ to port PORT.*\); close connections, or start the program with "
    r"a higher limit \(ulimit -n\)\. Waiting, nothing is lost"
)


@chaos
@pytest.mark.parametrize(
    "port", ["rollouts", "announcements", "statuses", "probes", "dashboard", "weights"]
)
def test_steps_continue_during_2000_idle_connections(run: RealRun, port: str) -> None:
    names = ("rollouts", "announcements", "statuses", "probes")
    ports = {name: run.port + n for n, name in enumerate(names)} | {"weights": free_ports()}
    settings = ("--train.max-steps", "40", "--weights.serve-port", str(ports["weights"]))
    trainer = run.trainer(*settings, shell='ulimit -n 256; exec "$@"')
    generator = run.generator("ann")
    until(lambda: run.step >= 3, trainer, generator)
    ports["dashboard"] = int(re.search(r"dashboard: http://[^:]*:(\d+)", trainer.printed)[1])  # type: ignore
    raise_open_files_limit()
    with ExitStack() as stack:
        for _ in range(2000):
            stranger = stack.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", ports[port]))
        step = run.step
        until(lambda: run.step >= step + 20, trainer, generator)
    end_well(run, trainer, generator)


def num_descriptors(program: Program) -> int:
    return len(os.listdir(f"/proc/{program.process.pid}/fd"))
