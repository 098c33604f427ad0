"""The hosts file: valid hosts, and errors that name the host and a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from peralta_zmq.config.hosts import Hosts, load_hosts
from peralta_zmq.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "configs/hosts.example.toml"
TRAINER = '[[host]]\nname = "mac"\nrole = "trainer"\nssh = "mac.local"\n'


def load(folder: Path, text: str) -> Hosts:
    path = folder / "hosts.toml"
    path.write_text(text)
    return load_hosts(path)


def error_of(folder: Path, text: str) -> str:
    """The one-line error for a file, without the leading file name."""
    with pytest.raises(ConfigError) as caught:
        load(folder, text)
    (line,) = str(caught.value).splitlines()
    start = f"{folder}/hosts.toml: "
    assert line.startswith(start)
    return line.removeprefix(start)


def test_hosts_have_workers_and_options(tmp_path: Path) -> None:
    hosts = load(
        tmp_path,
        TRAINER + 'count = 1\n[[host]]\nname = "pc"\nssh = "-p 2222 me@pc"\ncount = 2\n'
        'device = "cuda"\nweights_dir = "/mnt/my nas/w"\nenv = { A = "1" }\n',
    )
    mac, pc = hosts.host
    assert hosts.trainer == mac
    assert mac.workers == ["mac-trainer", "mac-0"]
    assert pc.workers == pc.generators == ["pc-0", "pc-1"]
    assert hosts.generators == ["mac-0", "pc-0", "pc-1"]
    assert mac.folder == pc.folder == "~/peralta_zmq"
    assert pc.env == {"A": "1"}


def test_example_runs_on_this_machine_without_a_copy() -> None:
    hosts = load_hosts(EXAMPLE)
    (here,) = hosts.host
    assert here.ssh is None and here.folder is None
    assert here.workers == ["here-trainer", "here-0"]
    assert (EXAMPLE.parents[1] / hosts.config).exists()


def test_commented_host_of_the_example_is_valid(tmp_path: Path) -> None:
    lines = EXAMPLE.read_text().splitlines()
    start = lines.index("# [[host]]")
    text = "\n".join([*lines[:start], *(line.removeprefix("# ") for line in lines[start:])])
    pc = load(tmp_path, text).host[1]
    assert pc.ssh == "me@pc.local" and pc.workers == ["pc-0", "pc-1"]


@pytest.mark.parametrize(("text", "expected"), [
    (TRAINER,
     "there are no generators; add a host, or set count = 1 on host mac for a generator there"),
    ('[[host]]\nname = "pc"\n', 'no host has the role trainer; give one host role = "trainer"'),
    (f'{TRAINER}[[host]]\nname = "pc"\nrole = "trainer"\n',
     "the hosts mac and pc have the role trainer; give one host role = \"trainer\""),
    (f'{TRAINER}[[host]]\nname = "mac"\n',
     "mac is the name of 2 hosts or workers; rename a host, or list a machine once and set its "
     "count"),
    (f'{TRAINER}count = 1\n[[host]]\nname = "mac-0"\nssh = "pc"\n',
     "mac-0 is the name of 2 hosts or workers; rename a host, or list a machine once and set its "
     "count"),
    (f'{TRAINER}[[host]]\nname = "pc"\nssh = "mac.local"\ndir = "~/peralta_zmq/"\n',
     "hosts mac and pc are the same folder of the same machine; list that machine once and set "
     "its count, or give each host its own dir"),
    (f'{TRAINER}[[host]]\nname = "a"\ncount = 1\n[[host]]\nname = "a b"\ndir = "x"\n',
     "host.2.name = 'a b' is wrong: should be a plain name; use letters, digits, . _ and -"),
    (f'{TRAINER}[[host]]\nname = "pc"\nrolle = "x"\n',
     "unknown setting rolle in [[host]]; did you mean role?"),
    (f'{TRAINER}[[host]]\nname = "pc"\ncount = 0\n',
     "host pc: count = 0 starts no worker; leave the host out"),
    (f'{TRAINER}[[host]]\nname = "pc"\nssh = "me@pc -v"\n',
     "host pc: ssh 'me@pc -v' must end with the host name, as in -p 2222 me@box"),
    ("[slurm.trainer]\ncount = 3\n", "unknown setting count in [slurm.trainer]; did you mean "
     "account?"),
    *((f'[slurm.trainer]\noptions = ["{option}"]\n',
       f"'{option}' in options is not allowed, because bin/lan could not control the job; leave "
       "it out")
      for option in ("--array=0-9", "-n8", "-Qn8", "--ntasks=8", "--export=NONE", "-Mother",
                     "--cluster=other", "--test-only", "-W", "--wrap=date")),
    *((f'[slurm.trainer]\noptions = ["{option}"]\n',
       f"'{option}' in options is no single option of sbatch; write it as in \"--mem=16G\", one "
       "string for each option") for option in ("--mem 4G", "job.sh", "--")),
])  # fmt: skip
def test_invalid_hosts_are_refused_by_name(tmp_path: Path, text: str, expected: str) -> None:
    assert error_of(tmp_path, text) == expected


def test_slurm_table_replaces_hosts(tmp_path: Path) -> None:
    hosts = load(tmp_path, '[slurm.trainer]\ntime = "2-12"\n[slurm.generators]\ncount = 9\n')
    assert hosts.slurm and hosts.slurm.generators.count == 9 and hosts.host == ()
    options = '"--mem=4G", "--nodelist=a", "-Ca100", "--qos=x", "--wait-all-nodes=1"'
    load(tmp_path, f"[slurm.trainer]\noptions = [{options}]\n")


@pytest.mark.parametrize("folder", ["~", "/", ".", "~/", "..", "~/a/../..", "/a b", "$HOME", "~x"])
def test_unsafe_folder_is_refused(tmp_path: Path, folder: str) -> None:
    text = f'{TRAINER}[[host]]\nname = "pc"\nssh = "pc"\ndir = "{folder}"\n'
    assert error_of(tmp_path, text).startswith(f"host pc: dir {folder!r} is not a plain path")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"configs/hosts.tml is not a TOML file"):
        load_hosts(Path("configs/hosts.tml"))
    with pytest.raises(ConfigError, match=r"hosts.exmple.toml does not exist; did you mean"):
        load_hosts(EXAMPLE.with_name("hosts.exmple.toml"))
