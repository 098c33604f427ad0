"""Steps of bin/lan, selected workers and refused addresses, without ssh or a worker."""

from __future__ import annotations

from pathlib import Path

import pytest
from hosts import HOSTS, MAC, PC, config, hosts_file

from peralta_zmq.config.hosts import Hosts
from peralta_zmq.config.sections import EngineSection, SecuritySection, WireSection
from peralta_zmq.config.training_sections import TrainSection
from peralta_zmq.errors import ConfigError
from peralta_zmq.operate import host_setup, lan, ssh


def test_dry_run_prints_every_command_and_runs_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh.subprocess, "run", None)
    monkeypatch.setattr(ssh.subprocess, "Popen", None)
    keys = SecuritySection(keys=str(tmp_path / "keys"))
    launcher = lan.SshLauncher(HOSTS, dry_run=True)
    assert launcher.up(config(security=keys)) == 0
    out = capfd.readouterr().out
    titles = [line for line in out.splitlines() if line.startswith("# ")]
    assert titles == [f"# {host}: {title}" for title, hosts in [
        ("probe", "mac pc"), ("copy", "mac pc"), ("install", "mac pc"), ("settings", "mac pc"),
        ("check", "mac pc"), ("doctor", "mac"), ("doctor", "pc"), ("start", "mac pc"),
    ] for host in hosts.split()]  # fmt: skip
    prefix = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 " \
          "-o ServerAliveCountMax=3 -o RemoteCommand=none -p 2222 -T"  # fmt: skip
    assert f"{prefix} me@pc 'cd ~/peralta_zmq && make --no-print-directory setup" in out
    assert "--delete --exclude=/.git --exclude=/.venv" in out
    copy = next(line for line in out.splitlines() if line.endswith(" me@pc:peralta_zmq/"))
    assert f"-e '{prefix}' {host_setup.REPO}/" in copy
    assert f" {host_setup.REPO}/peralta_zmq " in copy
    assert not (tmp_path / "keys").exists()
    assert "export A=..." in out and '"A": "..."' in out and "b c" not in out


def test_up_without_checkout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_setup, "REPO", tmp_path)
    path = hosts_file(tmp_path / "hosts.toml", {"name": "a", "role": "trainer", "count": 1})
    with pytest.raises(ConfigError, match="up copies a checkout of the project to the hosts, and"):
        lan.main(["up", "--hosts", str(path), "--dry-run"])


def test_select_accepts_names_of_hosts_and_workers() -> None:
    selected = lan.select_workers(HOSTS, ["pc-1", "mac"])
    assert [(host.name, names) for host, names in selected] == [
        ("mac", ["mac-trainer", "mac-0"]), ("pc", ["pc-1"])]  # fmt: skip
    assert [names for _, names in lan.select_workers(HOSTS, [])] == [MAC.workers, PC.workers]
    with pytest.raises(ConfigError, match=r"no host or worker 'pv'; there are mac, mac-0, mac-tr"):
        lan.select_workers(HOSTS, ["pv"])


def test_hosts_that_cannot_reach_weights_or_trainer_are_refused() -> None:
    without_weights = Hosts(host=(MAC, PC.model_copy(update={"weights_dir": None})))
    with pytest.raises(ConfigError, match="host pc: weights_dir is missing; set it to the path"):
        lan.check_addresses(without_weights, config())
    over_http = PC.model_copy(update={"weights_dir": "http://mac.local:8471"})
    lan.check_addresses(
        Hosts(host=(MAC.model_copy(update={"weights_dir": None}), over_http)), config()
    )
    loopback = config(wire=WireSection(host="127.0.0.1"))
    with pytest.raises(ConfigError, match=r"wire.host 127.0.0.1 is the loopback address; set wire"):
        lan.check_addresses(HOSTS, loopback)
    lan.check_addresses(HOSTS, config())


def test_hosts_that_give_away_more_than_their_memory_are_refused() -> None:
    train, engine = TrainSection(memory_fraction=0.6), EngineSection(gpu_memory_utilization=0.4)
    shared = config(train=train, engine=engine)
    lan.check_memory(HOSTS, shared)  # 1.0 on mac, 0.8 on pc
    second = {"name": "pc2", "dir": "~/second"}
    twice = Hosts(host=(MAC, PC, PC.model_copy(update=second)))
    with pytest.raises(ConfigError, match=r"each of 4 generators are 1.6 of .* host pc and pc2; "):
        lan.check_memory(twice, shared)
    same_card = Hosts(host=(MAC, PC, PC.model_copy(update={**second, "device": "auto"})))
    with pytest.raises(ConfigError, match=r"each of 4 generators are 1.6 of .* host pc and pc2; "):
        lan.check_memory(same_card, shared)
    next_card = Hosts(host=(MAC, PC, PC.model_copy(update={**second, "device": "cuda:1"})))
    lan.check_memory(next_card, shared)
    other_card = {**second, "env": {"CUDA_VISIBLE_DEVICES": "1"}}
    lan.check_memory(Hosts(host=(MAC, PC, PC.model_copy(update=other_card))), shared)
    with pytest.raises(ConfigError, match=r"train.memory_fraction 0.7 and .* 1.1 .* host mac; "):
        lan.check_memory(HOSTS, config(train=TrainSection(memory_fraction=0.7), engine=engine))
