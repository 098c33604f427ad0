"""What bin/lan would run, and how it reads the answers: without ssh, and without a worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peralta_zmq.config import Config
from peralta_zmq.config.hosts import Host, Hosts
from peralta_zmq.config.sections import SecuritySection, WireSection
from peralta_zmq.errors import ConfigError
from peralta_zmq.operate import lan, shell, steps
from peralta_zmq.operate.keeper import Job
from peralta_zmq.operate.shell import Result

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
    return steps.probe(host)[0].judge(Result(0, out, ""))


# Commands.


def test_a_dry_run_prints_every_command_and_runs_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell.subprocess, "run", None)
    monkeypatch.setattr(shell.subprocess, "Popen", None)
    keys = SecuritySection(keys=str(tmp_path / "keys"))
    fleet = lan.Fleet(HOSTS, config(security=keys), dry_run=True)
    assert fleet.up() == 0
    out = capfd.readouterr().out
    titles = [line for line in out.splitlines() if line.startswith("# ")]
    assert titles == [f"# {host}: {title}" for title, hosts in [
        ("look", "mac pc"), ("copy", "mac pc"), ("install", "mac pc"), ("hand over", "mac pc"),
        ("doctor", "mac"), ("doctor", "pc"), ("start", "mac pc"),
    ] for host in hosts.split()]  # fmt: skip
    ssh = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 " \
          "-o ServerAliveCountMax=3 -p 2222"  # fmt: skip
    assert f"{ssh} me@pc 'cd ~/peralta_zmq && make --no-print-directory setup" in out
    assert "--delete --exclude=/.git --exclude=/.venv" in out
    assert f"-e '{ssh}' {steps.REPO}/ me@pc:peralta_zmq/" in out
    assert not (tmp_path / "keys").exists()


def test_each_worker_gets_the_settings_of_its_host() -> None:
    trainer, beside = steps.jobs_of(MAC, HOSTS, config())
    first, second = steps.jobs_of(PC, HOSTS, config())
    assert [each.name for each in (trainer, beside, first, second)] == [
        "mac-trainer", "mac-0", "pc-0", "pc-1"]  # fmt: skip
    assert trainer.command == (
        ".venv/bin/python", "bin/trainer", "@", ".lan/config.toml",
        "--weights.dir", "/Volumes/my nas/w", "--train.num-workers", "2")  # fmt: skip
    assert second.command == (
        ".venv/bin/python", "bin/generator", "@", ".lan/config.toml",
        "--weights.dir", "/mnt/nas/w", "--model.device", "cuda",
        "--generator.name", "pc-1", "--generator.index", "2", "--generator.count", "3",
        "--generator.num-workers", "2")  # fmt: skip
    assert second.env == {"HF_HUB_OFFLINE": "1", "A": "b c"}
    assert trainer.run == "runs/demo" and first.run is None


def test_jobs_survive_the_way_to_their_keeper() -> None:
    from peralta_zmq.operate.keeper import job_text, jobs_of

    jobs = [Job("a", ("x", "y z"), {"A": "ä\n"}), Job("b", ("w",), {}, "runs/demo")]
    assert jobs_of("".join(f"{job_text(job)}\n" for job in jobs)) == jobs


def test_a_host_gets_the_keys_it_needs_and_no_others(tmp_path: Path) -> None:
    for name in ("trainer", "mac-0", "pc-0", "pc-1"):
        (tmp_path / f"{name}.public").touch()
    names = {host.name: sorted(Path(each).name for each in steps.key_files(host, tmp_path))
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
    problem = shell.unreachable(PC, Result(255, "", err)) or ""
    assert err.rstrip(".") in problem and said in problem
    assert shell.unreachable(PC, Result(1, "", err)) is None


def test_a_copy_that_stopped_halfway_can_go_on() -> None:
    copied = steps.sync(PC)[1]
    assert copied.judge(Result(12, "", "rsync: connection unexpectedly closed")) == (
        "copying stopped halfway (rsync code 12: rsync: connection unexpectedly closed); "
        "the same command again goes on from there"
    )
    full = copied.judge(Result(11, "", "write failed: No space left on device (28)")) or ""
    assert full.endswith("the disk is full: make room there, then the same command again")


def test_the_failing_lines_of_a_doctor_are_told() -> None:
    judge = steps.doctor(PC, config()).judge
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
    own = config(wire=WireSection(host="127.0.0.1"))
    with pytest.raises(ConfigError, match=r"wire.host 127.0.0.1 is every machine's own; set wire"):
        lan.check_places(HOSTS, own)
    lan.check_places(HOSTS, config())
