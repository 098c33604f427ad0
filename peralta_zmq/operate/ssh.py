"""Commands on the hosts of a hosts file: build, print, run, explain failures.

Uses the system's ssh and rsync, so that ~/.ssh/config, agents and jump hosts take effect. A host
without `ssh` is this machine: its commands run in a local shell.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from peralta_zmq.config.hosts import Host

SSH = (
    *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),  # BatchMode: never prompt
    *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),  # a dead link ends ssh in 20 s
    *("-o", "RemoteCommand=none"),  # one in ~/.ssh/config would refuse ours
)
SSH_FAILED = 255  # exit code of ssh that could not connect
NOT_FOUND = 127  # exit code of a shell for a missing program
LONG_SECONDS = 3600.0  # time limit of copies and of the installation

Result: TypeAlias = subprocess.CompletedProcess[str]
FindProblem: TypeAlias = Callable[[Result], "str | None"]  # result -> "problem; remedy" or None


def last_line(result: Result) -> str:
    """The last line of a command's error output, or of its output, or its exit code."""
    lines = [line.strip() for line in (result.stderr or result.stdout).splitlines() if line.strip()]
    return lines[-1] if lines else f"exit code {result.returncode}"


def failure(result: Result, remedy: str = "") -> str | None:
    """The problem of a failed command: its last line and the remedy; None after a success."""
    if result.returncode == 0:
        return None
    return f"{last_line(result)}; {remedy}" if remedy else last_line(result)


@dataclass(frozen=True, slots=True)
class Command:
    """A command to run on this machine, and a function that explains its failure."""

    words: tuple[str, ...]
    stdin: str = ""
    seconds: float = 60.0  # time limit
    find_problem: FindProblem = failure

    @property
    def shown(self) -> str:
        text = shlex.join(self.words)
        if not self.stdin:
            return text
        lines = self.stdin.splitlines()
        if len(lines) > 12:
            return f"{text} < ({len(lines)} lines: {lines[0]} ...)"
        return "\n".join([f"{text} <<'END'", *lines, "END"])


def on_host(
    host: Host,
    script: str,
    stdin: str = "",
    *,
    seconds: float = 60.0,
    remedy: str = "",
    find_problem: FindProblem | None = None,
) -> Command:
    """The command that runs one line of shell on a host, in the home folder over ssh.

    `find_problem` gets all results but failed connections; default: `failure` with `remedy`.
    """
    words = ("/bin/sh", "-c", script)
    if host.ssh:
        options, machine = host.ssh_words
        words = (*SSH, *options, machine, script)
    find_problem = find_problem or partial(failure, remedy=remedy)
    return Command(words, stdin, seconds, partial(_problem_on_host, host, find_problem))


def rsync_to(host: Host, sources: Sequence[str], target: str, *options: str) -> Command:
    """The command that copies files to a host; `target` may begin with ~/."""
    words = ["rsync", "-a", *options]
    if host.ssh:
        ssh_options, machine = host.ssh_words
        machine = re.sub("[^@]*:[^@]*$", r"[\g<0>]", machine)  # IPv6
        remote = f"{machine}:{target.removeprefix('~/')}"
        words += ["-e", shlex.join([*SSH, *ssh_options]), *sources, remote]
    else:
        words += [*sources, os.path.expanduser(target)]
    find_problem = partial(_problem_on_host, host, _copy_problem)
    return Command(tuple(words), seconds=LONG_SECONDS, find_problem=find_problem)


def _copy_problem(result: Result) -> str | None:
    # Only this machine can lack rsync: bin/lan has checked the host before it copies.
    if result.returncode == NOT_FOUND:
        return f"there is no rsync on this machine; install it ({package_hint('rsync')})"
    if result.returncode == 0:
        return None
    text = f"copying stopped halfway (rsync code {result.returncode}: {last_line(result)})"
    if "No space left" in result.stderr:
        return f"{text}; the disk is full: make room there, then run the same command again"
    return f"{text}; the same command again continues the copy"


def package_hint(program: str) -> str:
    """How to install rsync or make."""
    mac_command = "xcode-select --install" if program == "make" else f"brew install {program}"
    return f"apt install {program}, or {mac_command}"


def run(command: Command) -> Result:
    """Run a command to its end or time limit; a failure is an exit code."""
    try:
        return subprocess.run(
            command.words,
            input=command.stdin,
            timeout=command.seconds,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except FileNotFoundError as error:
        problem = f"there is no {error.filename} on this machine; install it"
        return Result(command.words, NOT_FOUND, "", problem)
    except subprocess.TimeoutExpired:
        return _timed_out(command.words, command.seconds)


def _timed_out(words: Any, seconds: float) -> Result:
    return Result(words, 124, "", f"no end after {seconds:.0f} s")


@contextmanager
def run_in_background(
    command: Command, ready_line: str
) -> Generator[BackgroundCommand, None, None]:
    """Start a command and wait for an output line that begins with `ready_line`, or its end.

    It is killed at its time limit, or when the `with` block is left.
    """
    process = start(command, stderr=subprocess.PIPE)
    timer = threading.Timer(command.seconds, _kill, [process])
    timer.daemon = True
    timer.start()
    background = BackgroundCommand(process)
    try:
        assert process.stdin and process.stdout
        with suppress(BrokenPipeError):  # the command has already ended; its result tells why
            process.stdin.write(command.stdin)
            process.stdin.flush()
        for line in process.stdout:
            background.lines.append(line)
            if line.startswith(ready_line):
                background.is_ready = True
                break
        yield background
    finally:
        timer.cancel()
        if process.returncode is None:
            _kill(process)
            process.communicate()


def start(command: Command, *, stderr: int | None = None) -> subprocess.Popen[str]:
    """Start a command with pipes, in a new session: Ctrl-C in the terminal does not end it."""
    return subprocess.Popen(
        command.words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)


@dataclass(slots=True)
class BackgroundCommand:
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list[str])  # output up to the ready line
    is_ready: bool = False  # stays False if the command ends before its ready line

    def end(self, seconds: float = 60.0) -> Result:
        """Close the command's standard input and wait up to `seconds` for its result."""
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return _timed_out(self.process.args, seconds)
        out = "".join([*self.lines, out])
        return Result(self.process.args, self.process.returncode, out, err)


def _problem_on_host(host: Host, find_problem: FindProblem, result: Result) -> str | None:
    """The problem and remedy of a failed ssh connection, else of the command."""
    if not host.ssh or result.returncode != SSH_FAILED:
        return find_problem(result)
    error = " ".join(result.stderr.split())
    by_hand = f"ssh {host.ssh}"
    remedies = {
        "Permission denied": f"the host does not accept your ssh key; run ssh-copy-id {host.ssh}",
        "HOST IDENTIFICATION HAS CHANGED": f"the host key has changed; run {by_hand} by hand",
        "Host key verification failed": f"accept its host key once by hand: {by_hand}",
        "Could not resolve": "the name cannot be resolved; correct ssh = in the hosts file",
        "onfiguration option": "correct that line of the ssh config",
        "Connection refused": "no sshd listens there; start it (macOS: Sharing, Remote Login)",
    }
    default = f"cannot be reached; is it on, and does {by_hand} work?"
    remedy = next((text for pattern, text in remedies.items() if pattern in error), default)
    return f"ssh: {last_line(result).rstrip('.')}: {remedy}"
