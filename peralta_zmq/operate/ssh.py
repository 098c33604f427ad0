"""Commands on other machines with the system's ssh and rsync: build, show, run, explain failures.

~/.ssh/config, agents and jump hosts work as they do by hand.
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

# BatchMode: never prompt. ServerAlive: notice a dead connection within 20 s.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10",
       "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")  # fmt: skip
SSH_FAILED, TIMED_OUT, NOT_FOUND = 255, 124, 127  # exit codes of ssh, timeout and a shell
SHORT_SECONDS, LONG_SECONDS = 60.0, 3600.0  # time limits of commands
SHOWN_LINES = 12  # of a command's standard input, in a dry run


@dataclass(frozen=True, slots=True)
class Result:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        """The last line of the errors, else of the output, else the exit code."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return lines[-1] if lines else f"exit code {self.code}"


FindProblem: TypeAlias = Callable[[Result], "str | None"]  # the problem and its remedy


def failure(result: Result, remedy: str = "") -> str | None:
    """The last line of a command that failed, and the remedy; None if it succeeded."""
    if result.code == 0:
        return None
    return f"{result.last_line}; {remedy}" if remedy else result.last_line


@dataclass(frozen=True, slots=True)
class Command:
    """A command to run on this machine, and how to find the problem in its result."""

    words: tuple[str, ...]
    stdin: str = ""
    seconds: float = SHORT_SECONDS  # time limit
    find_problem: FindProblem = failure

    @property
    def shown(self) -> str:
        """The command as one would type it."""
        text = shlex.join(self.words)
        if not self.stdin:
            return text
        lines = self.stdin.splitlines()
        if len(lines) > SHOWN_LINES:
            return f"{text} < ({len(lines)} lines: {lines[0]} ...)"
        return "\n".join([f"{text} <<'END'", *lines, "END"])


def on_host(
    host: Host,
    script: str,
    stdin: str = "",
    *,
    seconds: float = SHORT_SECONDS,
    find_problem: FindProblem = failure,
) -> Command:
    """Run one line of shell in the home folder of a host, or here for a host without ssh."""
    words = (*SSH, *shlex.split(host.ssh), script) if host.ssh else ("/bin/sh", "-c", script)
    return Command(words, stdin, seconds, find_problem)


def rsync_to(host: Host, sources: Sequence[str], target: str, *options: str) -> Command:
    """Copy files or folders into a folder of a host; `target` may begin with ~/."""
    words = ["rsync", "-a", *options]
    if host.ssh:
        *ssh_options, machine = shlex.split(host.ssh)
        remote = f"{machine}:{target.removeprefix('~/')}"
        words += ["-e", shlex.join([*SSH, *ssh_options]), *sources, remote]
    else:
        target = target if target.startswith("~/") else shlex.quote(target)
        words = ["/bin/sh", "-c", f"{shlex.join([*words, *sources])} {target}"]
    return Command(tuple(words), seconds=LONG_SECONDS, find_problem=_copy_problem)


def _copy_problem(result: Result) -> str | None:
    if result.code == NOT_FOUND:  # on this machine: the probe has found rsync on the host
        return f"there is no rsync on this machine; install it ({package_hint('rsync')})"
    if result.code == 0:
        return None
    text = f"copying stopped halfway (rsync code {result.code}: {result.last_line})"
    if "No space left" in result.err:
        return f"{text}; the disk is full: make room there, then run the same command again"
    return f"{text}; the same command again continues the copy"


def package_hint(program: str) -> str:
    """How to install rsync or make."""
    mac_command = "xcode-select --install" if program == "make" else f"brew install {program}"
    return f"apt install {program}, or {mac_command}"


def run(command: Command) -> Result:
    """Run a command to its end, or to its time limit."""
    try:
        done = subprocess.run(
            command.words, input=command.stdin, capture_output=True, text=True, check=False,
            timeout=command.seconds, errors="replace",
        )  # fmt: skip
    except FileNotFoundError as error:
        return Result(NOT_FOUND, "", f"there is no {error.filename} on this machine; install it")
    except subprocess.TimeoutExpired:
        return _timed_out(command.seconds)
    return Result(done.returncode, done.stdout, done.stderr)


def _timed_out(seconds: float) -> Result:
    return Result(TIMED_OUT, "", f"no end after {seconds:.0f} s")


class BackgroundCommand:
    """A command that serves others until its standard input is closed. Use with `with`."""

    def __init__(self, command: Command, ready_line: str) -> None:
        """Start it and wait until it prints a line that begins with `ready_line`, or ends."""
        self._process = subprocess.Popen(
            command.words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        self._lines: list[str] = []
        self.is_ready = False  # stays False if it ends instead
        self._timer = threading.Timer(command.seconds, self._kill)
        self._timer.daemon = True
        self._timer.start()
        assert self._process.stdout
        try:
            for line in self._process.stdout:
                self._lines.append(line)
                if line.startswith(ready_line):
                    self.is_ready = True
                    break
        except BaseException:  # Ctrl-C reaches this process only: the command has its own session
            self.__exit__()
            raise

    def end(self, seconds: float = SHORT_SECONDS) -> Result:
        """Close its standard input and wait for its result."""
        try:
            out, err = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return _timed_out(seconds)
        return Result(self._process.returncode, "".join([*self._lines, out]), err)

    def __enter__(self) -> BackgroundCommand:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._process.returncode is None:
            self._kill()
            self._process.communicate()

    def _kill(self) -> None:
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the shell and its children


def ssh_problem(host: Host, result: Result) -> str | None:
    """Why ssh could not connect, with the remedy; None if it could."""
    if not host.ssh or result.code != SSH_FAILED:
        return None
    error, by_hand = " ".join(result.err.split()), f"ssh {host.ssh}"
    remedies = {
        "Permission denied": f"its key is not accepted there; ssh-copy-id {host.ssh}",
        "Host key verification failed": f"accept its host key once by hand: {by_hand}",
        "HOST IDENTIFICATION HAS CHANGED": f"the host key has changed; run {by_hand} by hand",
        "Could not resolve": "the name cannot be resolved; correct ssh = in the hosts file",
        "Connection refused": "no sshd listens there; start it (macOS: Sharing, Remote Login)",
    }
    default = f"cannot be reached; is it on, and does {by_hand} work?"
    remedy = next((text for sign, text in remedies.items() if sign in error), default)
    return f"ssh: {result.last_line.rstrip('.')}: {remedy}"
