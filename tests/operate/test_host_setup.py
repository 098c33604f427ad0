"""Steps that prepare a host: jobs, copies, keys, probe, doctor; on this machine, without ssh."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from hosts import HOSTS, MAC, PC, REPO, config, needs_rsync

from peralta_zmq.config import Config
from peralta_zmq.config.hosts import Host
from peralta_zmq.config.sections import RunSection, SecuritySection, WeightsSection
from peralta_zmq.operate import host_setup, ssh
from peralta_zmq.operate.ssh import Result

GOOD_PROBE = {"python": "3.11.7", "rsync": "/bin/rsync", "make": "/bin/make", "free": "9000000",
        "writable": "yes"}  # fmt: skip


def probe_problem(host: Host, **changes: str) -> str | None:
    """The problem of a host whose probe prints good values except for `changes`."""
    out = "".join(f"{name}={word}\n" for name, word in {**GOOD_PROBE, **changes}.items() if word)
    return host_setup.probe(host)[0].find_problem(Result((), 0, out, ""))


def test_workers_get_the_options_of_their_host() -> None:
    settings = str(host_setup.settings_file(config()))
    trainer, generator = host_setup.jobs_of(MAC, config())
    first, second = host_setup.jobs_of(PC, config())
    assert [job.name for job in (trainer, generator, first, second)] == [
        "mac-trainer", "mac-0", "pc-0", "pc-1"]  # fmt: skip
    assert trainer.command == (
        ".venv/bin/python", "bin/trainer", "@", settings,
        "--weights.dir", "/Volumes/my nas/w", "--run.num-workers", "2")  # fmt: skip
    assert second.command == (
        ".venv/bin/python", "bin/generator", "@", settings,
        "--weights.dir", "/mnt/nas/w", "--model.device", "cuda",
        "--generator.name", "pc-1", "--run.num-workers", "2")  # fmt: skip
    assert second.env == {"HF_HUB_OFFLINE": "1", "A": "b c"}
    assert trainer.run == "runs/demo" and first.run is None


@pytest.mark.skipif(not shutil.which("make"), reason="no make on this machine")
def test_source_dated_in_the_future_does_not_install_at_each_make(tmp_path: Path) -> None:
    sources = ("Makefile", "pyproject.toml", ".ci/constraints.txt")
    for number, name in enumerate((*sources, ".venv/bin/python")):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text((REPO / name).read_text() if name in sources else "#!/bin/sh\n")
        file.chmod(0o755)
        tomorrow = time.time_ns() + (24 + number) * 3600 * 10**9
        os.utime(file, ns=(tomorrow, tomorrow))
    outputs = [subprocess.run(["make", "setup"], cwd=tmp_path, capture_output=True, text=True)
               for _ in range(2)]  # fmt: skip
    assert ["setting up .venv" in output.stdout for output in outputs] == [True, False], outputs


def test_changed_settings_change_the_job_and_use_another_file() -> None:
    other = config(run=RunSection(seed=1))
    before, after = (host_setup.jobs_of(PC, settings) for settings in (config(), other))
    assert [job.name for job in before] == [job.name for job in after]
    assert all(old != new for old, new in zip(before, after, strict=True))
    assert host_setup.jobs_of(PC, config()) == before
    (written,) = host_setup.send_settings(PC, other)
    assert str(host_setup.settings_file(other)) in written.shown
    assert str(host_setup.settings_file(config())) not in written.shown
    assert str(host_setup.settings_file(other)) in after[0].command
    assert str(host_setup.settings_file(other)) in host_setup.doctor(PC, other).shown


def test_weights_password_is_sent_if_this_machine_has_it(tmp_path: Path) -> None:
    token = tmp_path / "token"
    served = config(security=SecuritySection(token_file=str(token), insecure=True))
    assert len(host_setup.send_settings(PC, served)) == 1  # each host has its own file at that path
    assert "--security.token-file" not in host_setup.jobs_of(PC, served)[0].command
    token.write_text("x" * 32)
    assert host_setup.send_settings(PC, served)[1].words[-2:] == (
        str(token), "me@pc:peralta_zmq/.lan/weights-token")  # fmt: skip
    for host in HOSTS.host:
        for job in host_setup.jobs_of(host, served):
            index = job.command.index("--security.token-file")
            assert job.command[index + 1] == ".lan/weights-token"
    assert "--security.token-file .lan/weights-token" in host_setup.doctor(PC, served).shown


# Files that a copy keeps.


def copy_to(host: Host, settings: Config, hosts_file: Path) -> None:
    for step in host_setup.sync(host, settings, hosts_file):
        assert step.find_problem(ssh.run(step)) is None


@needs_rsync
def test_sync_keeps_runs_and_weights_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo, target = tmp_path / "repo", tmp_path / "target"
    monkeypatch.setattr(host_setup, "REPO", repo)
    host = Host(name="pc", dir=str(target), weights_dir=f"{target}/nas[1]/weights")
    settings = config(run=RunSection(dir="./out"), weights=WeightsSection(dir="configs/w"))

    def put(*files: str) -> None:
        for file in map(tmp_path.joinpath, files):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("")

    put("repo/bin/lan", "repo/bin/old", "repo/configs/a.toml", "repo/Makefile", "repo/runs/demo/1",
        "repo/out/mine/journal", "repo/nas[1]/weights/mine", "repo/.git/HEAD")  # fmt: skip
    copy_to(host, settings, host_setup.HOSTS_FILE)
    copied = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert copied == ["Makefile", "bin/lan", "bin/old", "configs/a.toml"]
    kept = ["target/out/demo/checkpoints/1", "target/nas[1]/weights/RUN.json", "target/runs/demo/1",
            "target/configs/w/RUN.json", "target/earlier/demo/checkpoints/1"]  # fmt: skip
    put(*kept, "target/bin/stray")
    (repo / "bin/old").unlink()
    copy_to(host, settings, host_setup.HOSTS_FILE)
    assert all((tmp_path / path).exists() for path in kept)
    assert [job.name for job in (target / "bin").iterdir()] == ["lan"]


@needs_rsync
def test_sync_leaves_no_hosts_file_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo, target = tmp_path / "repo", tmp_path / "target"
    monkeypatch.setattr(host_setup, "REPO", repo)
    (repo / ".git").mkdir(parents=True)
    for folder in (repo, target):  # the host has copies
        (folder / "configs").mkdir(parents=True)
        for name in ("configs/hosts.toml", "configs/my [hosts].toml", "lab.toml"):
            (folder / name).write_text("a password")
    (repo / "configs/a.toml").write_text("")

    def copy(folder: Path, hosts_file: str) -> None:
        copy_to(Host(name="pc", dir=str(folder)), config(), repo / hosts_file)

    copy(target, "configs/my [hosts].toml")
    assert [path.name for path in (target / "configs").iterdir()] == ["a.toml"]
    copy(target, "lab.toml")
    assert not (target / "lab.toml").exists()
    copy(repo, "lab.toml")  # the checkout itself
    assert len(list(repo.rglob("*.toml"))) == 4


def test_sent_keys_are_in_a_folder_that_only_its_owner_can_write(tmp_path: Path) -> None:
    host = Host(name="pc", dir=str(tmp_path))
    settings, *_ = host_setup.send_settings(host, config(security=SecuritySection(keys="keys")))
    previous = os.umask(0o002)
    try:
        assert settings.find_problem(ssh.run(settings)) is None
    finally:
        os.umask(previous)
    assert (tmp_path / host_setup.KEYS).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("folder", "runs", "weights", "patterns"), [
    ("/srv/p", "runs", None, ["/runs"]),
    ("/srv/p", "a/../out/", "w", ["/out", "/w"]),
    ("/srv/p", ".", "../w", ["/demo"]),
    ("/srv/p", "/srv/p/out", "/srv/other/w", ["/out"]),
    ("~/p", "~/p/out", "/home/me/p/w", ["/out", "/w"]),
    ("~/p", "/data/runs", "http://mac:8471", []),
])  # fmt: skip
def test_run_patterns_cover_paths_inside_the_project(
    folder: str, runs: str, weights: str | None, patterns: list[str]
) -> None:
    host = Host(name="pc", ssh="pc", dir=folder, weights_dir=weights)
    assert host_setup.run_patterns(host, config(run=RunSection(dir=runs))) == patterns


def test_host_gets_only_the_keys_it_needs(tmp_path: Path) -> None:
    for name in ("trainer", "mac-0", "pc-0", "pc-1"):
        (tmp_path / f"{name}.public").touch()
    names = {host.name: sorted(Path(file).name for file in host_setup.key_files(host, tmp_path))
             for host in HOSTS.host}  # fmt: skip
    assert names == {
        "mac": ["mac-0.public", "mac-0.secret", "pc-0.public", "pc-1.public", "trainer.public",
                "trainer.secret"],
        "pc": ["pc-0.secret", "pc-1.secret", "trainer.public"],
    }  # fmt: skip


# Problems of a host.


@pytest.mark.parametrize(("changes", "expected"), [
    ({"python": "3.8.18"}, "python3.11 does not run Python 3.11 or later (3.8.18); set python ="),
    ({"python": "sh: python3.11: not found"},
     "python3.11 does not run Python 3.11 or later (sh: python3.11: not found); set python = to"),
    ({"rsync": ""}, "there is no rsync; install it there (apt install rsync, or brew install rsyn"),
    ({"make": ""}, "there is no make; install it there (apt install make, or xcode-select --insta"),
    ({"full": "yes"}, "~/peralta_zmq holds files that bin/lan did not put there; choose another"),
    ({"writable": ""}, "~/peralta_zmq cannot be written; choose another dir"),
    ({"free": "1024000"}, "the disk of ~/peralta_zmq is full: 1000 MB free, 3000 MB needed; ma"),
    ({"free": "102400", "ready": "yes"}, "the disk of ~/peralta_zmq is full: 100 MB free, 200 MB"),
])  # fmt: skip
def test_bad_host_is_reported_with_a_remedy(changes: dict[str, str], expected: str) -> None:
    assert (probe_problem(PC, **changes) or "").startswith(expected)
    assert probe_problem(PC, full="yes", ours="yes") is None


def test_environment_of_a_doctor_is_on_no_command_line(tmp_path: Path) -> None:
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "ready $TOKEN"\ncat >&2\n')
    python.chmod(0o755)
    host = Host(name="pc", dir=str(tmp_path), role="trainer", env={"TOKEN": "it's a secret"})
    with ssh.run_in_background(host_setup.doctor(host, config()), "ready") as doctor:
        assert doctor.lines == ["ready it's a secret\n"]
        shell = psutil.Process(doctor.process.pid)
        commands = [" ".join(each.cmdline()) for each in (shell, *shell.children(recursive=True))]
        assert "bin/doctor" in "".join(commands) and "secret" not in "".join(commands)
        result = doctor.end()
    assert (result.returncode, result.stderr) == (0, "")


def test_failed_checks_of_a_doctor_are_reported() -> None:
    find_problem = host_setup.doctor(PC, config()).find_problem
    checks = [
        {"name": "ports", "ok": False, "detail": "5555 is taken", "remedy": "stop it"},
        {"name": "device", "ok": True, "detail": "cpu", "remedy": ""},
    ]
    out = f"FAIL ports\n{json.dumps({'checks': checks})}\n"
    assert find_problem(Result((), 1, out, "")) == "ports: 5555 is taken; stop it"
    assert find_problem(Result((), 0, out, "")) is None
    assert (
        find_problem(Result((), 1, "", "Traceback\nOSError: x\n"))
        == "bin/doctor failed: OSError: x"
    )
