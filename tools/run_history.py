"""History of a finished run: its journal, events, metrics, summary and generator logs."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from peralta_zmq import wire
from peralta_zmq.atomic_files import STEP_NAME
from peralta_zmq.config import RESOLVED, load_config
from peralta_zmq.observe.metrics import EVENTS, METRICS, Row, number, read_rows
from peralta_zmq.observe.report import SUMMARY

# Options of a run that the promise checker can check: it reads debug logs and the whole journal.
RECORDING_OPTIONS = ("--log.level", "debug", "--checkpoint.keep-journal")
# What would follow the model and the machine if left out, but for the batch: as configs/demo.toml.
DEMO_OPTIONS = (
    *("--train.learning-rate", "2e-4", "--train.max-tokens-per-microbatch", "16384"),
    *("--sampling.max-completion-length", "48", "--engine.max-model-len", "512"),
    *("--eval.interval", "100"),
)
MAX_VOCAB_SIZE = 1 << 31  # token ids are not checked
HEADER = struct.Struct("<IIB")  # bytes, crc32 of kind and content, kind
GROUP, DROPPED = 1, 2  # kinds of records, as in peralta_zmq/trainer/journal.py
STARTED = re.compile(r" generator=\S+ threads=\d+ version=\d+$")
TIME = re.compile(r"(\d\d):(\d\d):(\d\d) ")
MADE = re.compile(
    r"made group=(\S+)/(\d+) step=(\d+) weights_id=(\w+)(?: newest=(\d+))?"
    r"(?: evaluation_step=(\d+))?"
)
LOST = re.compile(r"lost group=(\S+)/(\d+) ")
HOSTILE = re.compile(r"hostile group=(\S+)/(\d+) time=([\d.]+) expected=(\w+) ")
LOADED = re.compile(r"loaded version=(\d+) step=(\d+) weights_id=(\w+)")
REFUSED = re.compile(r"refused (version=\d+)|load failed (version=\d+).*does not verify")
COMPLETE = "run complete"
DAY_SECONDS = 24 * 60 * 60

Key: TypeAlias = tuple[str, int]  # sender (generator NAME/INCARNATION), group_number of the group


class Record(NamedTuple):
    """Journal record of a group: its outcome in the step whose batch it arrived for."""

    key: Key
    outcome: str  # trained, no_signal, or the reason why it was dropped
    step: int
    policy_step: int = -1  # oldest one that it was sampled with; -1 if it was dropped
    min_group_number: int = 0  # the sender has no group below it that is not durable

    @property
    def age(self) -> int:
        """Optimizer steps since these weights; negative if the policy step is impossible."""
        return self.step - 1 - self.policy_step


class Load(NamedTuple):
    number: int
    step: int
    weights_id: str


class HostileGroup(NamedTuple):
    """A group that tools.hostile_sender has sent."""

    time: float  # when it was sent, in seconds since 1970
    expected: str  # its outcome in promise_checker.hostile_groups


@dataclass(slots=True)
class Logs:
    made: dict[Key, int] = field(default_factory=dict[Key, int])  # policy step
    made_at: dict[Key, int] = field(default_factory=dict[Key, int])  # second of the day
    made_with: dict[Key, str] = field(default_factory=dict[Key, str])  # weights_id
    newest: dict[Key, int] = field(default_factory=dict[Key, int])  # newest policy step in a group
    evaluating: set[Key] = field(default_factory=set[Key])  # made for an evaluation
    made_twice: list[Key] = field(default_factory=list[Key])
    hostile: dict[Key, HostileGroup] = field(default_factory=dict[Key, HostileGroup])
    lost: set[Key] = field(default_factory=set[Key])  # abandoned by the sender
    loads: list[Load] = field(default_factory=list[Load])
    refused: list[str] = field(default_factory=list[str])
    # Senders that received the end of the run, and the second of the day
    complete: dict[str, int] = field(default_factory=dict[str, int])

    def seconds_before_end(self, key: Key) -> int:
        """Time from the completion of a group to the end of its sender's run, under a day."""
        return (self.complete[key[0]] - self.made_at[key]) % DAY_SECONDS


@dataclass(frozen=True, slots=True)
class History:
    max_steps: int
    max_off_policy_steps: int
    rows: Sequence[Row]
    events: Sequence[Row]
    summary: Row
    journal: Sequence[Record]
    logs: Logs
    filters: bool = False  # curriculum.online_difficulty_filtering


def last_step(metrics: Path) -> int:
    """Return the step of the newest row of metrics.jsonl; 0 for an empty or absent file."""
    rows = read_rows(metrics)
    return int(number(rows[-1], "step")) if rows else 0


def read_history(
    folder: Path, logs: Sequence[Path] = (), *, max_steps: int | None = None
) -> History:
    """Read the history of the run in `folder`.

    `logs` are the generators' logs, by default those in folder/logs; `max_steps` overrides the
    run's setting. Raises ConfigError if the folder holds no run.
    """
    config = load_config("history", ["@", str(folder / RESOLVED)])
    on_policy = config.train.max_async_level == 0
    summary = folder / SUMMARY
    return History(
        max_steps=max_steps or config.train.max_steps,
        max_off_policy_steps=0 if on_policy else config.train.max_off_policy_steps,
        rows=read_rows(folder / METRICS),
        events=read_rows(folder / EVENTS),
        summary=json.loads(summary.read_bytes()) if summary.exists() else {},
        journal=list(read_journal(folder / "journal")),
        logs=read_logs(logs or sorted(folder.glob("logs/generator-*.log"))),
        filters=config.curriculum.online_difficulty_filtering,
    )


def read_journal(folder: Path) -> Iterator[Record]:
    """The record of each group, in the order of steps. Raises WireError if it cannot be decoded."""
    for file in sorted(folder.glob("step_*.msgpack")):
        if not STEP_NAME.fullmatch(file.stem):
            continue
        for kind, content in _records(file.read_bytes()):
            if kind in (GROUP, DROPPED):
                yield _record_of(kind, content, step=int(file.stem[5:]))


def read_logs(files: Sequence[Path]) -> Logs:
    """Read the groups made and lost, and the versions loaded and refused, from generator logs."""
    logs = Logs()
    for file in files:
        sender, text = "", file.read_text("utf-8", errors="replace")
        for line in text.splitlines():
            sender = _read_line(line, sender, logs)
        for match in HOSTILE.finditer(text):
            logs.hostile[match[1], int(match[2])] = HostileGroup(float(match[3]), match[4])
    return logs


def _read_line(line: str, sender: str, logs: Logs) -> str:
    """Parse one line; returns the sender, which is known after its first group."""
    if STARTED.search(line):
        logs.complete.pop(sender, None)  # the end of a shorter run, which was continued
        return ""
    if match := MADE.search(line):
        sender, key = match[1], (match[1], int(match[2]))
        if key in logs.made:
            logs.made_twice.append(key)
        logs.made[key] = int(match[3])
        logs.made_at[key] = _second_of_day(line)
        logs.made_with[key] = match[4]
        if match[5]:
            logs.newest[key] = int(match[5])
        if match[6]:
            logs.evaluating.add(key)
    elif match := LOST.search(line):
        logs.lost.add((match[1], int(match[2])))
    elif match := LOADED.search(line):
        logs.loads.append(Load(int(match[1]), int(match[2]), match[3]))
    elif match := REFUSED.search(line):
        logs.refused.append(match[1] or match[2])
    elif COMPLETE in line and sender:
        logs.complete[sender] = _second_of_day(line)
    return sender


def _second_of_day(line: str) -> int:
    match = TIME.match(line)
    return sum(int(match[n]) * 60 ** (3 - n) for n in (1, 2, 3)) if match else 0


def _record_of(kind: int, content: bytes, *, step: int) -> Record:
    if kind == DROPPED:
        note = json.loads(content)
        key = (note["sender"], note["group_number"])
        return Record(key, note["outcome"], step, min_group_number=note.get("min_group_number", 0))
    group = wire.decode_group(content, wire.GroupLimits(MAX_VOCAB_SIZE))
    outcome = "trained" if group.has_signal else "no_signal"
    key = (group.sender, group.group_number)
    return Record(key, outcome, step, group.policy_step, group.min_group_number)


def _records(content: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + HEADER.size <= len(content):
        size, checksum, kind = HEADER.unpack_from(content, offset)
        offset += HEADER.size
        body = content[offset : offset + size]
        if not size or len(body) < size or zlib.crc32(body, kind) != checksum:
            return  # an incomplete last record was never committed
        yield kind, body
        offset += size
