"""What bin/lan would run, and how it reads the answers: without ssh, and without a worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hosts import needs_rsync

from peralta_zmq.config import Config
from peralta_zmq.config.hosts import Host, Hosts
from peralta_zmq.config.sections import RunSection, SecuritySection, WeightsSection, WireSection
from peralta_zmq.errors import ConfigError
from peralta_zmq.operate import host_setup, lan, ssh
from peralta_zmq.operate.ssh import Result
from peralta_zmq.operate.supervisor import Job

MAC = Host(name="mac", ssh="mac.local", role="trainer", count=1, weights_dir="/Volumes/my nas/w")
PC = Host(name="pc", ssh="-p 2222 me@pc", count=2, device="cuda", weights_dir="/mnt/nas/w",
          python="python3.11", env={"A": "b c"})  # fmt: skip
HOSTS = Hosts(host=(MAC, PC))
WELL = {"python": "3.11.7", "rsync": "/bin/rsync", "make": "/bin/make", "free": "9000000",
        "writable": "yes"}  # fmt: skip


def config(**sections: object) -> Config:
    return Config(**{"wire": WireSection(host="mac.local", bind="0.0.0.0"),
                     "security": SecuritySection(insecure=True), **sections})  # fmt: skip


def looked_at(host: Host, **changes: str) -> str | None:
    """What the judge says of a host that is well but for these lines."""
    out = "".join(f"{name}={word}\n" for name, word in {**WELL, **changes}.items() if word)
    return host_setup.probe(host)[0].judge(Result(0, out, ""))


# Commands.


def test_a_dry_run_prints_every_command_and_runs_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh.subprocess, "run", None)
    monkeypatch.setattr(ssh.subprocess, "Popen", None)
    keys = SecuritySection(keys=str(tmp_path / "keys"))
    fleet = lan.Fleet(HOSTS, config(security=keys), dry_run=True)
    assert fleet.up() == 0
    out = capfd.readouterr().out
    titles = [line for line in out.splitlines() if line.startswith("# ")]
    assert titles == [f"# {host}: {title}" for title, hosts in [
        ("look", "mac pc"), ("copy", "mac pc"), ("install", "mac pc"), ("hand over", "mac pc"),
        ("check", "mac pc"), ("doctor", "mac"), ("doctor", "pc"), ("start", "mac pc"),
    ] for host in hosts.split()]  # fmt: skip
    prefix = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 " \
          "-o ServerAliveCountMax=3 -p 2222"  # fmt: skip
    assert f"{prefix} me@pc 'cd ~/peralta_zmq && make --no-print-directory setup" in out
    assert "--delete --exclude=/.git --exclude=/.venv" in out
    copied = next(line for line in out.splitlines() if line.endswith(" me@pc:peralta_zmq/"))
    assert f"-e '{prefix}' {host_setup.REPO}/" in copied
    assert f" {host_setup.REPO}/peralta_zmq " in copied
    assert not (tmp_path / "keys").exists()


def test_each_worker_gets_the_settings_of_its_host() -> None:
    settings = str(host_setup.settings_file(config()))
    trainer, beside = host_setup.jobs_of(MAC, HOSTS, config())
    first, second = host_setup.jobs_of(PC, HOSTS, config())
    assert [each.name for each in (trainer, beside, first, second)] == [
        "mac-trainer", "mac-0", "pc-0", "pc-1"]  # fmt: skip
    assert trainer.command == (
        ".venv/bin/python", "bin/trainer", "@", settings,
        "--weights.dir", "/Volumes/my nas/w", "--train.num-workers", "2")  # fmt: skip
    assert second.command == (
        ".venv/bin/python", "bin/generator", "@", settings,
        "--weights.dir", "/mnt/nas/w", "--model.device", "cuda",
        "--generator.name", "pc-1", "--generator.index", "2", "--generator.count", "3",
        "--generator.num-workers", "2")  # fmt: skip
    assert second.env == {"HF_HUB_OFFLINE": "1", "A": "b c"}
    assert trainer.run == "runs/demo" and first.run is None


def test_other_settings_make_another_job_and_leave_the_file_of_those_that_run() -> None:
    other = config(run=RunSection(seed=1))
    before, after = (host_setup.jobs_of(PC, HOSTS, each) for each in (config(), other))
    assert [job.name for job in before] == [job.name for job in after]
    assert all(old != new for old, new in zip(before, after, strict=True))
    assert host_setup.jobs_of(PC, HOSTS, config()) == before
    (written,) = host_setup.hand_over(PC, other)
    assert str(host_setup.settings_file(other)) in written.command.shown
    assert str(host_setup.settings_file(config())) not in written.command.shown
    assert str(host_setup.settings_file(other)) in after[0].command
    assert str(host_setup.settings_file(other)) in host_setup.doctor(PC, other).command.shown


def test_the_password_of_the_weights_goes_along_where_this_machine_has_it(tmp_path: Path) -> None:
    token = tmp_path / "token"
    served = config(weights=WeightsSection(token_file=str(token)))
    assert len(host_setup.hand_over(PC, served)) == 1  # every host has its own, at that path
    assert "--weights.token-file" not in host_setup.jobs_of(PC, HOSTS, served)[0].command
    token.write_text("x" * 32)
    assert host_setup.hand_over(PC, served)[1].command.words[-2:] == (
        str(token), "me@pc:peralta_zmq/.lan/weights-token")  # fmt: skip
    for host in HOSTS.host:
        for job in host_setup.jobs_of(host, HOSTS, served):
            at = job.command.index("--weights.token-file")
            assert job.command[at + 1] == ".lan/weights-token"
    assert "--weights.token-file .lan/weights-token" in host_setup.doctor(PC, served).command.shown


# What a copy leaves alone.


@needs_rsync
def test_what_a_run_leaves_on_a_host_survives_every_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, there = tmp_path / "ours", tmp_path / "there"
    monkeypatch.setattr(host_setup, "REPO", ours)
    host = Host(name="pc", dir=str(there), weights_dir=f"{there}/nas[1]/weights")
    settings = config(run=RunSection(dir="./out"), weights=WeightsSection(dir="configs/w"))

    def copy() -> None:
        for step in host_setup.sync(host, settings):
            assert step.judge(ssh.run(step.command)) is None

    def put(*files: str) -> None:
        for file in map(tmp_path.joinpath, files):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("")

    put("ours/bin/lan", "ours/bin/old", "ours/configs/a.toml", "ours/Makefile", "ours/runs/demo/1",
        "ours/out/mine/journal", "ours/nas[1]/weights/mine", "ours/.git/HEAD")  # fmt: skip
    copy()
    made = sorted(str(each.relative_to(there)) for each in there.rglob("*") if each.is_file())
    assert made == ["Makefile", "bin/lan", "bin/old", "configs/a.toml"]
    left = ["there/out/demo/checkpoints/1", "there/nas[1]/weights/RUN.json", "there/runs/demo/1",
            "there/configs/w/RUN.json", "there/earlier/demo/checkpoints/1"]  # fmt: skip
    put(*left, "there/bin/stray")
    (ours / "bin/old").unlink()
    copy()
    assert all((tmp_path / each).exists() for each in left)
    assert [each.name for each in (there / "bin").iterdir()] == ["lan"]


@pytest.mark.parametrize(("folder", "runs", "weights", "patterns"), [
    ("/srv/p", "runs", None, ["/runs"]),
    ("/srv/p", "a/../out/", "w", ["/out", "/w"]),
    ("/srv/p", ".", "../w", ["/demo"]),
    ("/srv/p", "/srv/p/out", "/srv/other/w", ["/out"]),
    ("~/p", "~/p/out", "/home/me/p/w", ["/out", "/w"]),
    ("~/p", "/data/runs", "http://mac:8471", []),
])  # fmt: skip
def test_runs_and_weights_within_the_project_are_found(
    folder: str, runs: str, weights: str | None, patterns: list[str]
) -> None:
    host = Host(name="pc", ssh="pc", dir=folder, weights_dir=weights)
    assert host_setup.left_by_runs(host, config(run=RunSection(dir=runs))) == patterns


def test_jobs_survive_the_way_to_their_keeper() -> None:
    from peralta_zmq.operate.supervisor import job_text, jobs_of

    jobs = [Job("a", ("x", "y z"), {"A": "ä\n"}), Job("b", ("w",), {}, "runs/demo")]
    assert jobs_of("".join(f"{job_text(job)}\n" for job in jobs)) == jobs


def test_a_host_gets_the_keys_it_needs_and_no_others(tmp_path: Path) -> None:
    for name in ("trainer", "mac-0", "pc-0", "pc-1"):
        (tmp_path / f"{name}.public").touch()
    names = {host.name: sorted(Path(each).name for each in host_setup.key_files(host, tmp_path))
             for host in HOSTS.host}  # fmt: skip
    assert names == {
        "mac": ["mac-0.public", "mac-0.secret", "pc-0.public", "pc-1.public", "trainer.public",
                "trainer.secret"],
        "pc": ["pc-0.secret", "pc-1.secret", "trainer.public"],
    }  # fmt: skip


def test_a_name_means_a_host_or_one_of_its_workers() -> None:
    chosen = lan.select(HOSTS, ["pc-1", "mac"])
    assert [(host.name, names) for host, names in chosen] == [
        ("mac", ["mac-trainer", "mac-0"]), ("pc", ["pc-1"])]  # fmt: skip
    assert [names for _, names in lan.select(HOSTS, [])] == [MAC.workers, PC.workers]
    with pytest.raises(ConfigError, match=r"no host or worker 'pv'; there are mac, mac-0, mac-tr"):
        lan.select(HOSTS, ["pv"])


# What is wrong with a host.


def test_a_host_that_is_well_passes() -> None:
    assert looked_at(PC) is None
    assert looked_at(PC, full="yes", ours="yes") is None


@pytest.mark.parametrize(("changes", "said"), [
    ({"python": "3.8.18"}, "python3.11 is Python 3.8.18, and 3.10 or later is needed; set python"),
    ({"python": "sh: python3.11: not found"},
     "python3.11 does not run (sh: python3.11: not found); set python = to one of 3.10 or later"),
    ({"rsync": ""}, "there is no rsync; install it there (apt install rsync, or brew install rsyn"),
    ({"make": ""}, "there is no make; install it there (apt install make, or xcode-select --insta"),
    ({"full": "yes"}, "~/peralta_zmq holds files that bin/lan did not put there; choose another"),
    ({"writable": ""}, "~/peralta_zmq cannot be written; choose another dir"),
    ({"free": "1024000"}, "the disk of ~/peralta_zmq is full: 1000 MB free, 3000 MB needed; ma"),
    ({"free": "102400", "ready": "yes"}, "the disk of ~/peralta_zmq is full: 100 MB free, 200 MB"),
])  # fmt: skip
def test_a_host_that_is_not_well_says_what_and_the_remedy(
    changes: dict[str, str], said: str
) -> None:
    assert (looked_at(PC, **changes) or "").startswith(said)


@pytest.mark.parametrize(("err", "said"), [
    ("ssh: connect to host pc port 22: Connection refused",
     "no sshd listens there; start it (macOS: Sharing, Remote Login)"),
    ("me@pc: Permission denied (publickey).", "its key is not accepted there; ssh-copy-id -p 2222"),
    ("Host key verification failed.", "accept its host key once by hand: ssh -p 2222 me@pc"),
    ("ssh: Could not resolve hostname pc", "nobody knows that name; correct ssh = in the hosts f"),
    ("ssh: connect to host pc port 22: Connection timed out",
     "cannot be reached; is it on, and does ssh -p 2222 me@pc work?"),
])  # fmt: skip
def test_a_host_that_ssh_does_not_reach_says_why(err: str, said: str) -> None:
    problem = ssh.unreachable(PC, Result(255, "", err)) or ""
    assert err.rstrip(".") in problem and said in problem
    assert ssh.unreachable(PC, Result(1, "", err)) is None


def test_a_copy_that_stopped_halfway_can_go_on() -> None:
    copied = host_setup.sync(PC, config())[1]
    assert copied.judge(Result(12, "", "rsync: connection unexpectedly closed")) == (
        "copying stopped halfway (rsync code 12: rsync: connection unexpectedly closed); "
        "the same command again goes on from there"
    )
    full = copied.judge(Result(11, "", "write failed: No space left on device (28)")) or ""
    assert full.endswith("the disk is full: make room there, then the same command again")


@pytest.mark.parametrize("host", [PC, Host(name="here", dir="~/copy")])
def test_no_rsync_on_this_machine(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    copied = host_setup.sync(host, config())[1]
    assert copied.judge(ssh.run(copied.command)) == (
        "there is no rsync on this machine; install it (apt install rsync, or brew install rsync)"
    )


def test_a_command_that_never_serves_or_never_ends_is_ended() -> None:
    silent = ssh.Command(("/bin/sh", "-c", "sleep 60; true"), seconds=0.1)
    with ssh.Standing(silent, "ready") as standing:
        assert not standing.serves and standing.end().code != 0
    stays = ssh.Command(("/bin/sh", "-c", "echo ready; sleep 60; true"))
    with ssh.Standing(stays, "ready") as standing:
        assert standing.serves
        assert standing.end(seconds=0.1) == Result(124, "", "no end after 0 s")


def test_the_failing_lines_of_a_doctor_are_told() -> None:
    judge = host_setup.doctor(PC, config()).judge
    checks = [
        {"name": "ports", "ok": False, "detail": "5555 is taken", "remedy": "stop it"},
        {"name": "device", "ok": True, "detail": "cpu", "remedy": ""},
    ]
    out = f"FAIL ports\n{json.dumps({'checks': checks})}\n"
    assert judge(Result(1, out, "")) == "ports: 5555 is taken; stop it"
    assert judge(Result(0, out, "")) is None
    assert judge(Result(1, "", "Traceback\nOSError: x\n")) == "bin/doctor failed: OSError: x"


def test_hosts_that_could_not_find_each_other_are_refused() -> None:
    nowhere = Hosts(host=(MAC, PC.model_copy(update={"weights_dir": None})))
    with pytest.raises(ConfigError, match="host pc: weights_dir is missing; set it to the shared"):
        lan.check_places(nowhere, config())
    behind = PC.model_copy(update={"weights_dir": "http://mac.local:8471"})
    lan.check_places(Hosts(host=(MAC.model_copy(update={"weights_dir": None}), behind)), config())
    own = config(wire=WireSection(host="127.0.0.1"))
    with pytest.raises(ConfigError, match=r"wire.host 127.0.0.1 is every machine's own; set wire"):
        lan.check_places(HOSTS, own)
    lan.check_places(HOSTS, config())
