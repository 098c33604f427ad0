"""Commands on other machines, with the system's own ssh and rsync: made, shown, run, explained.

~/.ssh/config, agents and jump hosts work as they do by hand. Knows ssh's ways to fail; knows
nothing of what the commands are for.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from peralta_zmq.config.hosts import Host

# No question that nobody answers, and a dead link is noticed within 20 s.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10",
       "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")  # fmt: skip
SSH_FAILED = 255
SHOWN_LINES = 12  # of what a command reads, in a dry run
MOMENT, LONG = 60.0, 3600.0  # seconds a command may take


@dataclass(frozen=True, slots=True)
class Command:
    """Words to run on this machine, and what is written to their standard input."""

    words: tuple[str, ...]
    given: str = ""
    seconds: float = MOMENT

    @property
    def shown(self) -> str:
        """As a person would type it."""
        text = shlex.join(self.words)
        if not self.given:
            return text
        lines = self.given.splitlines()
        if len(lines) > SHOWN_LINES:
            return f"{text} < ({len(lines)} lines: {lines[0]} ...)"
        return "\n".join([f"{text} <<'END'", *lines, "END"])


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def last_words(self) -> str:
        """The last line that it said, errors first."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {self.code}"


RewardRunner: TypeAlias = Callable[[Result], str | None]  # what is wrong, with its remedy


def on(host: Host, script: str, given: str = "", seconds: float = MOMENT) -> Command:
    """Run one line of shell on a host, in the home folder, or here in the present one."""
    words = (*SSH, *shlex.split(host.ssh), script) if host.ssh else ("/bin/sh", "-c", script)
    return Command(words, given, seconds)


def program_on(host: Host, script: str, seconds: float = MOMENT) -> Command:
    """Run many lines of plain shell on a host, whatever the login shell there is."""
    return on(host, "sh -s", script, seconds)


def copy_to(host: Host, sources: Sequence[str], target: str, *options: str) -> Command:
    """rsync files or folders into a folder of a host; `target` may begin with ~/."""
    if not host.ssh:
        place = shlex.quote(target) if not target.startswith("~/") else target
        words = shlex.join(["rsync", "-a", *options, *sources])
        return Command(("/bin/sh", "-c", f"{words} {place}"), seconds=LONG)
    *through, machine = shlex.split(host.ssh)
    return Command(
        ("rsync", "-a", *options, "-e", shlex.join([*SSH, *through]), *sources,
         f"{machine}:{target.removeprefix('~/')}"),
        seconds=LONG,
    )  # fmt: skip


def run(command: Command) -> Result:
    """Run it to its end; one that takes too long ends with code 124."""
    try:
        ended = subprocess.run(
            command.words, input=command.given, capture_output=True, text=True, check=False,
            timeout=command.seconds, errors="replace",
        )  # fmt: skip
    except FileNotFoundError as error:
        return Result(127, "", f"there is no {error.filename} on this machine; install it")
    except subprocess.TimeoutExpired:
        return _too_long(command.seconds)
    return Result(ended.returncode, ended.stdout, ended.stderr)


def _too_long(seconds: float) -> Result:
    return Result(124, "", f"no end after {seconds:.0f} s")


class Standing:
    """A command that serves others until it is told to end. Use with `with`."""

    def __init__(self, command: Command, sign: str) -> None:
        """Start it, and wait until it prints a line that begins with `sign`, or ends."""
        self._process = subprocess.Popen(
            command.words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        self._said: list[str] = []
        self.serves = False  # it ended instead
        self._killer = threading.Timer(command.seconds, self._kill)
        self._killer.daemon = True
        self._killer.start()
        try:
            self._wait_for(sign)
        except BaseException:  # Ctrl-C reaches us alone
            self.__exit__()
            raise

    def end(self, seconds: float = MOMENT) -> Result:
        """Close its standard input and take what it has to say; code 124 when it will not end."""
        try:
            out, err = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return _too_long(seconds)
        return Result(self._process.returncode, "".join([*self._said, out]), err)

    def __enter__(self) -> Standing:
        return self

    def __exit__(self, *_: object) -> None:
        self._killer.cancel()
        if self._process.returncode is None:
            self._kill()
            self._process.communicate()

    def _wait_for(self, sign: str) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._said.append(line)
            if line.startswith(sign):
                self.serves = True
                return

    def _kill(self) -> None:
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)  # a shell, and what it runs


def unreachable(host: Host, result: Result) -> str | None:
    """Why ssh did not get there, with the remedy; None when it did."""
    if not host.ssh or result.code != SSH_FAILED:
        return None
    said, by_hand = " ".join(result.err.split()), f"ssh {host.ssh}"
    for sign, remedy in (
        ("Permission denied", f"its key is not accepted there; ssh-copy-id {host.ssh}"),
        ("Host key verification failed", f"accept its host key once by hand: {by_hand}"),
        ("HOST IDENTIFICATION HAS CHANGED", f"another machine answers; see {by_hand}"),
        ("Could not resolve", "nobody knows that name; correct ssh = in the hosts file"),
        ("Connection refused", "no sshd listens there; start it (macOS: Sharing, Remote Login)"),
    ):
        if sign in said:
            return f"ssh: {_last(result)}: {remedy}"
    return f"ssh: {_last(result)}: cannot be reached; is it on, and does {by_hand} work?"


def _last(result: Result) -> str:
    return result.last_words.rstrip(".")
