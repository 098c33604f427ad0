"""The weight store on real network file systems and through power cuts, in a guest kernel.

Each test prints what it measured (`pytest -s`).
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from typing import Any

import pytest
from lab.machine import Machine

CUTS = int(os.environ.get("CUTS", "10"))  # of the disk; a third as many kills of the kernel
OUTAGE_SECONDS = float(os.environ.get("OUTAGE", "12"))
POLL_SECONDS = 1.0
VISIBLE_SECONDS = 5.0
CATCH_UP_SECONDS = 30.0  # TCP backs off after each failed attempt
SSHFS_OPTIONS = "dcache_timeout=2"  # the default lists new files 20 s late
PROTOCOLS = ("nfs3", "nfs4", "cifs", "sshfs")

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300 + 30 * CUTS)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_client_lists_a_new_version_within_five_seconds(machine: Machine, protocol: str) -> None:
    options = SSHFS_OPTIONS if protocol == "sshfs" else ""
    events = machine.run(
        "visible",
        protocol=protocol,
        rounds=5,
        poll_seconds=POLL_SECONDS,
        options=options,
        timeout=240,
    )
    versions = _all(events, "version")
    assert len(versions) == 10
    delays = [max(0.0, each["seen"]["at"] - each["done"]["at"]) for each in versions]
    print(
        f"\n{protocol}: seen after {statistics.median(delays):.2f} s, at most {max(delays):.2f} s"
    )
    assert max(delays) <= VISIBLE_SECONDS
    assert all(each["loaded"]["exact"] for each in versions)
    assert all(each["loaded"]["weights_id"] == each["done"]["weights_id"] for each in versions)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_version_opens_by_its_announced_number(machine: Machine, protocol: str) -> None:
    versions = _all(machine.run("announced", protocol=protocol, rounds=5, timeout=120), "version")
    assert len(versions) == 5
    delays = [each["loaded"]["at"] - each["done"]["at"] for each in versions]
    print(f"\n{protocol}: loaded by name after {max(delays):.2f} s at most")
    assert max(delays) <= VISIBLE_SECONDS
    assert all(each["loaded"]["exact"] for each in versions)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_full_nas_refuses_a_version_and_recovers(machine: Machine, protocol: str) -> None:
    events = machine.run("full", protocol=protocol, timeout=180)
    first, full, again, meanwhile, freed, read = (
        _one(events, event) for event in ("first", "full", "again", "meanwhile", "freed", "read")
    )
    print(f"\n{protocol}: {full['reply'].get('message')}; left: {_temporary(full)}")
    assert first["reply"]["number"] == 1
    for refused in (full, again):
        assert refused["reply"]["error"] == "StoreError"
    for then in (full, meanwhile):
        assert {name for name in then["names"] if name.startswith("step_")} == FIRST_VERSION
        assert not [name for name in _temporary(then) if "/" in name], "what was half-written stays"
    assert meanwhile["newest"]["number"] == 1
    assert freed["reply"]["number"] >= 2
    assert read["loaded"]["weights_id"] == freed["reply"]["weights_id"]
    assert read["loaded"]["exact"]


FIRST_VERSION = {
    "step_00000001",
    *(
        f"step_00000001/{n}"
        for n in ("STABLE", "config.json", "manifest.json", "model.safetensors")
    ),
}


@pytest.mark.parametrize("protocol", ["nfs3", "nfs4"])
def test_reader_survives_the_removal_of_its_version(machine: Machine, protocol: str) -> None:
    events = machine.run("pruned", protocol=protocol, timeout=120)
    reader, careless = _one(events, "reader"), _one(events, "careless")["reply"]
    print(f"\n{protocol}: {reader['during'].get('message', 'loaded it')}; mapped: {careless}")
    if protocol == "nfs3":  # the server of NFSv4 keeps what a client has open
        assert careless == {"died": signal.SIGBUS}, "the file was not removed under its readers"
    assert "died" not in reader["during"]
    assert reader["during"].get("exact") or reader["during"]["error"] == "StoreError"
    assert reader["after"]["number"] == 3
    assert reader["after"]["exact"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_old_weights_are_used_while_the_nas_is_away(machine: Machine, protocol: str) -> None:
    events = machine.run("outage", protocol=protocol, seconds=OUTAGE_SECONDS, timeout=500)
    event = _one(events, "reader")
    reader, publisher = event["reply"], _one(events, "publisher")
    caught_up = reader["at"] - event["back"]
    print(
        f"\n{protocol}: away for {OUTAGE_SECONDS:.0f} s; served on, longest pause "
        f"{reader['longest_pause']:.2f} s; new weights {caught_up:.1f} s after the link, "
        f"the publisher {publisher['after']:.1f} s after it ({publisher['first']})"
    )
    assert [number for _, number in reader["serving"]] == [1, 2]
    assert reader["serving"][1][0] - reader["serving"][0][0] >= OUTAGE_SECONDS
    assert reader["intact"]
    assert reader["longest_pause"] <= 2.0
    assert caught_up <= CATCH_UP_SECONDS
    assert publisher["first"].get("number") or publisher["first"]["error"] == "StoreError"
    assert _one(events, "later")["loaded"] == {
        "number": publisher["done"]["number"],
        "weights_id": publisher["done"]["weights_id"], "exact": True,
        "seconds": _one(events, "later")["loaded"]["seconds"],
    }  # fmt: skip


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_lost_mount_gets_no_local_writes(machine: Machine, protocol: str) -> None:
    events = machine.run("vanished", protocol=protocol, timeout=120)
    empty, absent = _all(events, "gone")
    print(f"\n{protocol}: {empty['reply'].get('message')}")
    assert "RUN.json" in empty["reply"]["message"]
    for gone in (empty, absent):
        assert gone["reply"]["error"] == "StoreError"
        assert gone["newest"]["number"] is None
        assert gone["local"] == []
    back = _one(events, "back")
    assert _one(events, "meanwhile")["newest"]["number"] == 1
    assert back["loaded"]["weights_id"] == back["done"]["weights_id"]
    assert back["loaded"]["exact"]


def test_power_cuts_of_the_disk_lose_no_announced_version(machine: Machine) -> None:
    events = machine.run("cuts", count=CUTS, seed=7, timeout=60 + 25 * CUTS)
    cuts, control = _all(events, "synced"), _all(events, "void")
    assert len(cuts) == len(control) == CUTS
    announced = sum(cut["announced"] for cut in cuts)
    lost = sum(len(cut["lost"]) for cut in control)
    print(f"\n{CUTS} cuts: {announced} announced, none lost or torn; without fsync {lost} lost")
    assert announced >= CUTS
    for cut in cuts:
        assert cut["lost"] == []
        assert cut["torn"] == []
    assert lost, "the same store without fsync lost nothing: these are no power cuts"


def test_killed_kernel_loses_no_announced_version(machine: Machine) -> None:
    rng = random.Random(7)
    announced: dict[str, str] = {}
    count = max(3, CUTS // 3)
    for number in range(count):
        announced |= _publish_until_cut(machine, announced, number * 100_000 + 1, rng)
    with machine.on("publishing", first_step=count * 100_000 + 1) as running:
        verified = next(
            each for each in running.events(timeout=60) if each.get("event") == "verified"
        )
    _check_versions(announced, verified)
    print(f"\n{count} kernels killed, {len(announced)} versions announced, all there")
    assert len(announced) >= count


def _publish_until_cut(
    machine: Machine, before: dict[str, str], first_step: int, rng: random.Random
) -> dict[str, str]:
    """Verify the earlier versions, then publish for a while; returns the announced versions."""
    events: list[dict[str, Any]] = []
    with machine.on("publishing", first_step=first_step) as running:
        deadline = None
        for event in running.events(timeout=90):
            events.append(event)
            if event["event"] == "announced" and deadline is None:
                deadline = time.monotonic() + rng.uniform(0.2, 2.0)
            if deadline is not None and time.monotonic() > deadline:
                break
        events += running.cut_power()
    _check_versions(before, _one(events, "verified"))
    return {str(each["number"]): each["weights_id"] for each in _all(events, "announced")}


def _check_versions(announced: dict[str, str], verified: dict[str, Any]) -> None:
    assert verified["bad"] == [], "a version with STABLE does not verify"
    assert {number: verified["good"].get(number) for number in announced} == announced


def _temporary(event: dict[str, Any]) -> list[str]:
    return [name for name in event["names"] if name.startswith(".tmp")]


def _all(events: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [each for each in events if each["event"] == event]


def _one(events: list[dict[str, Any]], event: str) -> dict[str, Any]:
    (only,) = _all(events, event)
    return only
