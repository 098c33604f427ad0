"""Commands on hosts: explanations of failures, time limits; without ssh."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hosts import PC, config

from peralta_zmq.config.hosts import Host
from peralta_zmq.operate import host_setup, ssh
from peralta_zmq.operate.ssh import Result


@pytest.mark.parametrize(("err", "expected"), [
    ("ssh: connect to host pc port 22: Connection refused",
     "no sshd listens there; start it (macOS: Sharing, Remote Login)"),
    ("me@pc: Permission denied (publickey).",
     "the host does not accept your ssh key; run ssh-copy-id -p 2222"),
    ("HOST IDENTIFICATION HAS CHANGED! Host key verification failed.", "the host key has changed"),
    ("Host key verification failed.", "accept its host key once by hand: ssh -p 2222 me@pc"),
    ("/home/me/.ssh/config: terminating, 1 bad configuration options",
     "correct that line of the ssh config"),
    ("ssh: Could not resolve hostname pc", "the name cannot be resolved; correct ssh = in the ho"),
    ("ssh: connect to host pc port 22: Connection timed out",
     "cannot be reached; is it on, and does ssh -p 2222 me@pc work?"),
])  # fmt: skip
def test_failed_ssh_connection_is_explained(err: str, expected: str) -> None:
    find_problem = ssh.on_host(PC, "true").find_problem
    problem = find_problem(Result((), 255, "", err)) or ""
    assert err.rstrip(".") in problem and expected in problem
    assert find_problem(Result((), 1, "", err)) == err  # of the command, not of ssh


@pytest.mark.parametrize(("target", "options", "machine", "remote"), [
    ("box", (), "box", "box:w"),
    ("-p 22 me@box", ("-p", "22"), "me@box", "me@box:w"),
    ("ssh://me@box:2222/", ("-p", "2222"), "me@box", "me@box:w"),
    ("me@box:2222", ("-p", "2222"), "me@box", "me@box:w"),
    ("me@[fd00::2]", (), "me@fd00::2", "me@[fd00::2]:w"),
    ("fd00::2", (), "fd00::2", "[fd00::2]:w"),
    ("-v ssh://[fd00::2]:22", ("-v", "-p", "22"), "fd00::2", "[fd00::2]:w"),
])  # fmt: skip
def test_target_of_ssh_may_be_ipv6_or_a_url(
    target: str, options: tuple[str, ...], machine: str, remote: str
) -> None:
    host = Host(name="box", ssh=target)
    command, copy = ssh.on_host(host, "true").words, ssh.rsync_to(host, ["a"], "~/w").words
    assert command == (*ssh.SSH, *options, "-T", machine, "true")
    assert copy == ("rsync", "-a", "-e", shlex.join([*ssh.SSH, *options, "-T"]), "a", remote)


def test_interrupted_copy_names_code_and_remedy() -> None:
    copy = host_setup.sync(PC, config(), host_setup.HOSTS_FILE)[1]
    assert copy.find_problem(Result((), 12, "", "rsync: connection unexpectedly closed")) == (
        "copying stopped halfway (rsync code 12: rsync: connection unexpectedly closed); "
        "the same command again continues the copy"
    )
    full = copy.find_problem(Result((), 11, "", "write failed: No space left on device (28)")) or ""
    assert full.endswith("the disk is full: make room there, then run the same command again")


@pytest.mark.parametrize("host", [PC, Host(name="here", dir="~/copy")])
def test_missing_local_rsync_is_reported(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    copy = host_setup.sync(host, config(), host_setup.HOSTS_FILE)[1]
    assert copy.find_problem(ssh.run(copy)) == (
        "there is no rsync on this machine; install it (apt install rsync, or brew install rsync)"
    )


def test_background_command_is_killed_after_its_time_limit() -> None:
    silent = ssh.Command(("/bin/sh", "-c", "sleep 60; true"), seconds=0.1)
    with ssh.run_in_background(silent, "ready") as command:
        assert not command.is_ready and command.end().returncode != 0
    stays = ssh.Command(("/bin/sh", "-c", "echo ready; sleep 60; true"))
    with ssh.run_in_background(stays, "ready") as command:
        assert command.is_ready
        assert command.end(seconds=0.1).stderr == "no end after 0 s"
