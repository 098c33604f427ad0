"""What a run and its generators have written, read once after everything has ended.

Reads the journal, the events, the metrics, the summary and the generators' logs, and changes none
of them; knows nothing of what a run promises (see `promises`) or of the processes that wrote.
"""

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
from peralta_zmq.observe.metrics import EVENTS, METRICS, Row, read_rows
from peralta_zmq.observe.report import SUMMARY

# Options of a run that the promise checker can check: it reads debug logs and the whole journal.
RECORDING_OPTIONS = ("--log.level", "debug", "--checkpoint.keep-journal")
ANY_TOKEN = 1 << 31  # what the tokens mean is the trainer's business
HEADER = struct.Struct("<IIB")  # bytes, crc32 of kind and content, kind
GROUP, DROPPED = 1, 2  # kinds of records
STARTED = re.compile(r" generator=\S+ threads=\d+ version=\d+$")
MADE = re.compile(
    r"made group=(\S+)/(\d+) step=(\d+) weights_id=(\w+)(?: newest=(\d+))?"
    r"(?: evaluation_step=(\d+))?"
)
LOST = re.compile(r"lost group=(\S+)/(\d+) ")
LOADED = re.compile(r"loaded version=(\d+) step=(\d+) weights_id=(\w+)")
REFUSED = re.compile(r"refused (version=\d+)|unread (version=\d+).*does not verify")
COMPLETE = "run complete"

Key: TypeAlias = tuple[str, int]  # sender NAME/BOOT, sequence


class Record(NamedTuple):
    """What the journal says of a group: its fate in the step that it came for."""

    key: Key
    fate: str  # trained, no_signal, or the reason why it was dropped
    step: int
    policy_step: int = -1  # that it claims to be sampled with; -1 = it was dropped

    @property
    def age(self) -> int:
        """Optimizer steps since these weights; negative when they are none that it can have had."""
        return self.step - 1 - self.policy_step


class Load(NamedTuple):
    """A version that a generator has loaded."""

    number: int
    step: int
    weights_id: str


@dataclass(slots=True)
class Logs:
    """What the generators say of themselves."""

    made: dict[Key, int] = field(default_factory=dict[Key, int])  # the step of its weights
    made_with: dict[Key, str] = field(default_factory=dict[Key, str])  # ids of these weights
    newest: dict[Key, int] = field(default_factory=dict[Key, int])  # step, of newer tokens
    evaluating: set[Key] = field(default_factory=set[Key])  # made for an evaluation
    made_twice: list[Key] = field(default_factory=list[Key])
    lost: set[Key] = field(default_factory=set[Key])  # given up by the sender, and said so
    loads: list[Load] = field(default_factory=list[Load])
    refused: list[str] = field(default_factory=list[str])
    complete: set[str] = field(default_factory=set[str])  # senders that saw the end of the run


@dataclass(frozen=True, slots=True)
class History:
    """One run, whole."""

    max_steps: int
    max_off_policy_steps: int
    rows: Sequence[Row]
    events: Sequence[Row]
    summary: Row
    journal: Sequence[Record]
    logs: Logs
    filters: bool = False  # groups without difficulty are dropped
    rolled_back: frozenset[Key] = frozenset()  # settled in steps that a roll-back has set aside


def read_history(
    folder: Path, logs: Sequence[Path] = (), *, max_steps: int | None = None
) -> History:
    """The history of the run in `folder`; `logs` are those of generators elsewhere.

    Without them the logs in folder/logs are read; without `max_steps` the run's own setting
    counts. Raises ConfigError when the folder holds no run.
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
        rolled_back=frozenset(
            record.key
            for aside in folder.glob("rolled_back_to_*/journal")
            for record in read_journal(aside)
        ),
    )


def read_journal(folder: Path) -> Iterator[Record]:
    """Every whole record, in the order of steps. Raises WireError when one is not a group."""
    files = sorted(folder.glob("step_*.msgpack"))
    for file in (each for each in files if STEP_NAME.fullmatch(each.stem)):
        for kind, content in _records(file.read_bytes()):
            yield _record_of(kind, content, step=int(file.stem[5:]))


def read_logs(files: Sequence[Path]) -> Logs:
    """What the generators whose logs these are have made, lost, loaded and refused."""
    logs = Logs()
    for file in files:
        sender = ""
        for line in file.read_text("utf-8", errors="replace").splitlines():
            sender = _read_line(line, sender, logs)
    return logs


def _read_line(line: str, sender: str, logs: Logs) -> str:
    """Take in one line; returns who speaks, known from the first group it makes."""
    if STARTED.search(line):
        logs.complete.discard(sender)  # it saw the end of a shorter run, which was continued
        return ""
    if found := MADE.search(line):
        sender, key = found[1], (found[1], int(found[2]))
        if key in logs.made:
            logs.made_twice.append(key)
        logs.made[key] = int(found[3])
        logs.made_with[key] = found[4]
        if found[5]:
            logs.newest[key] = int(found[5])
        if found[6]:
            logs.evaluating.add(key)
    elif found := LOST.search(line):
        logs.lost.add((found[1], int(found[2])))
    elif found := LOADED.search(line):
        logs.loads.append(Load(int(found[1]), int(found[2]), found[3]))
    elif found := REFUSED.search(line):
        logs.refused.append(found[1] or found[2])
    elif COMPLETE in line and sender:
        logs.complete.add(sender)
    return sender


def _record_of(kind: int, content: bytes, *, step: int) -> Record:
    if kind == DROPPED:
        note = json.loads(content)
        return Record((note["sender"], note["sequence"]), note["outcome"], step)
    group = wire.decode_group(content, vocab_size=ANY_TOKEN)
    fate = "trained" if group.has_signal else "no_signal"
    return Record((group.sender, group.sequence), fate, step, group.policy_step)


def _records(content: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + HEADER.size <= len(content):
        size, checksum, kind = HEADER.unpack_from(content, at)
        at += HEADER.size
        body = content[at : at + size]
        if not size or len(body) < size or zlib.crc32(body, kind) != checksum:
            return  # a torn tail never counted
        yield kind, body
        at += size
