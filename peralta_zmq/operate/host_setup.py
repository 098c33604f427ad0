"""Steps that prepare a host: probe, copy, install, settings, doctor, workers.

Each step is a function that returns its commands for one host. `Host.folder` is the project folder
on the host, with a copy of the code; None on this machine, if the host uses this checkout (REPO).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from peralta_zmq.config import Config
from peralta_zmq.config.hosts import Host
from peralta_zmq.config.resolved import toml_text
from peralta_zmq.operate import ssh
from peralta_zmq.operate.ssh import Command, Result, on_host
from peralta_zmq.operate.supervisor import COPY_MARKER, FOLDER, Job, job_text

REPO = Path(__file__).resolve().parents[2]
HOSTS_FILE = Path("configs/hosts.toml")  # without --hosts
# rsync patterns of files that are neither copied to the host nor deleted there.
EXCLUDED = (
    *("/.git", "/.venv", "/.venv-*", "/.lan", "/runs", "/keys", "*.secret", "*.public"),
    *("*.egg-info", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis"),
)
KEYS = FOLDER / "keys"  # relative to the project folder
TOKEN = FOLDER / "weights-token"  # relative to the project folder
PYTHON = ".venv/bin/python"
# Seconds for --wait of bin/doctor: how long the trainer's doctor answers the doctors of generators,
# and how long a generator's doctor tries to connect.
DOCTOR_WAIT = {"trainer": "900", "generator": "20"}

# Shell script that prints facts about a host as NAME=VALUE. p is the project folder or its nearest
# existing parent; ours: bin/lan made the folder; full: it has files; ready: make setup succeeded.
PROBE = """
p={folder}; while [ ! -e "$p" ]; do p=$(dirname "$p"); done
echo python=$({python} -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>&1 | tail -n 1)
echo rsync=$(command -v rsync)
echo make=$(command -v make)
echo free=$(df -Pk "$p" | awk 'NR == 2 {{print $4}}')
[ -w "$p" ] && echo writable=yes
[ -e {folder}/.lan ] && echo ours=yes
[ -n "$(ls -A {folder} 2>/dev/null)" ] && echo full=yes
[ -e {folder}/.venv/ready ] && echo ready=yes
exit 0
"""


def in_project(host: Host, script: str) -> str:
    return f"cd {host.folder or shlex.quote(str(REPO))} && {script}"


def supervisor_script(host: Host, *words: str) -> str:
    """A line of shell that runs a command of operate/supervisor.py on the host."""
    return in_project(host, f"{PYTHON} -m peralta_zmq.operate.supervisor {' '.join(words)}")


def probe(host: Host) -> list[Command]:
    folder = host.folder or shlex.quote(str(REPO))
    script = PROBE.format(folder=folder, python=shlex.quote(host.python))
    # Sent to the standard input of sh, because the user's login shell may be csh or fish.
    return [on_host(host, "sh -s", script, find_problem=partial(_probe_problem, host))]


def sync(host: Host, config: Config, hosts_file: Path) -> list[Command]:
    """Copy the code; the file COPY_MARKER exists while the copy is incomplete.

    Files that no longer exist here are deleted on the host, but never runs or weights. Hosts files
    may hold passwords: they are not copied, and copies of them are deleted.
    """
    if host.folder is None:
        return []
    hosts_files = _hosts_files(hosts_file)
    patterns = [*EXCLUDED, *map(_pattern, hosts_files), *run_patterns(host, config)]
    excluded = [f"--exclude={name}" for name in patterns]
    marker = f"{host.folder}/{COPY_MARKER}"
    make_marker = f"mkdir -p {host.folder}/{FOLDER} && touch {marker}"
    # Remove hosts files of earlier copies; not from a checkout, which may be this one.
    if (REPO / ".git").exists():
        copies = " ".join(f"{host.folder}/{shlex.quote(path)}" for path in hosts_files)
        make_marker = f"test -e {host.folder}/.git || rm -f {copies}; {make_marker}"
    sources = sorted(str(path) for path in REPO.iterdir())
    return [
        on_host(host, make_marker, remedy="its folder cannot be created; choose another dir"),
        ssh.rsync_to(host, sources, f"{host.folder}/", "--delete", *excluded),
        on_host(host, f"rm -f {marker}", remedy="run bin/lan sync again"),
    ]


def run_patterns(host: Host, config: Config) -> list[str]:
    """rsync patterns that exclude runs and weights inside the host's project folder."""
    runs = os.path.normpath(config.run.dir)
    paths = [str(config.run_folder) if runs == "." else runs]
    paths += [path for path in (host.weights_dir, config.weights.dir) if path and "://" not in path]
    inner_paths = [_path_in(host.folder or "", os.path.normpath(path)) for path in paths]
    return [_pattern(path) for path in inner_paths if path]


def _pattern(path: str) -> str:
    return re.sub(r"[*?[]", r"[\g<0>]", f"/{path}")  # rsync takes a character in [] literally


def _hosts_files(hosts_file: Path) -> list[str]:
    """Paths in the project folder of `hosts_file`, if it is there, and of the default file."""
    files = {REPO / HOSTS_FILE, hosts_file.resolve()}
    return sorted(str(file.relative_to(REPO)) for file in files if file.is_relative_to(REPO))


def _path_in(folder: str, path: str) -> str | None:
    """A path on the host relative to the project folder; None if it is outside.

    The host's home folder is not known here: an absolute path is inside if it contains `folder`.
    """
    if not path.startswith(("/", "~")):
        return None if path.split("/")[0] in (".", "..") else path
    _, separator, inner = path.removeprefix("~").partition(f"/{folder.strip('~/')}/")
    return inner if separator else None


def install(host: Host) -> list[Command]:
    if host.folder is None:
        return []
    script = in_project(host, f"make --no-print-directory setup PYTHON={shlex.quote(host.python)}")
    remedy = f"make setup failed; run it by hand in {host.folder} to see all of its output"
    return [on_host(host, script, seconds=ssh.LONG_SECONDS, remedy=remedy)]


def send_settings(host: Host, config: Config) -> list[Command]:
    """Send the settings, the weight store's password and the host's keys, for its owner only."""
    private_folder = KEYS if config.keys_folder else FOLDER
    script = f"umask 077 && mkdir -p {private_folder} && cat > {settings_file(config)}"
    script = in_project(host, script)
    remedy = "the settings cannot be written; is the disk full?"
    steps = [on_host(host, script, toml_text(config), remedy=remedy)]
    folder = host.folder or REPO
    if token := token_file(config):
        steps.append(ssh.rsync_to(host, [str(token)], f"{folder}/{TOKEN}"))
    if keys := config.keys_folder:
        steps.append(ssh.rsync_to(host, key_files(host, keys), f"{folder}/{KEYS}/"))
    return steps


def settings_file(config: Config) -> Path:
    """The settings file in the project folder of a host; other settings have another name."""
    digest = hashlib.sha256(toml_text(config).encode()).hexdigest()
    return FOLDER / f"config-{digest[:12]}.toml"


def token_file(config: Config) -> Path | None:
    """The file with the password of the weight store, if it exists on this machine."""
    path = Path(config.security.token_file or "").expanduser()
    return path if path.is_file() else None


def make_keys(folder: Path, generators: Sequence[str]) -> None:
    from peralta_zmq.wire import auth

    for name in (auth.TRAINER, *generators):
        if auth.make_keys(folder, name):
            sys.stdout.write(f"key of {name}: made in {folder}\n")


def key_files(host: Host, keys: Path) -> list[str]:
    """Key files that a host needs: public keys of its peers, secret keys of its workers."""
    if host.role == "trainer":
        public = sorted(str(path) for path in keys.glob("*.public"))
        names = ["trainer", *host.generators]
    else:
        public = [str(keys / "trainer.public")]
        names = host.generators
    return [*public, *(str(keys / f"{name}.secret") for name in names)]


def doctor(host: Host, config: Config) -> Command:
    """Run bin/doctor; the trainer's answers those of generators until its input is closed."""
    words = [PYTHON, "bin/doctor", "--json", "--role", host.role, "--wait", DOCTOR_WAIT[host.role]]
    words += settings_options(host, config)
    if host.role == "generator":
        words += ["--generator.name", host.generators[0]]
    # The script goes to standard input: other users can read command lines, and the environment
    # variables may hold passwords.
    exports = [f"export {shlex.quote(f'{name}={value}')}" for name, value in host.env.items()]
    # `|| exit`: if cd fails, sh must not wait for more lines.
    start = in_project(host, f"exec {shlex.join(words)} || exit")
    script = "".join(f"{line}\n" for line in [*exports, start])
    return on_host(host, "sh -s", script, seconds=1800.0, find_problem=_doctor_problem)


def supervisor_steps(host: Host, command: str, config: Config) -> list[Command]:
    """Run the supervisor's command `check` or `start` with the jobs of the host."""
    lines = "".join(f"{job_text(job)}\n" for job in jobs_of(host, config))
    return [on_host(host, supervisor_script(host, command), lines)]


def jobs_of(host: Host, config: Config) -> list[Job]:
    """The jobs of a host: the trainer, if the host runs it, then its generators."""
    env = {"HF_HUB_OFFLINE": "1", **host.env}
    options = settings_options(host, config)
    # The workers of the host share its cores.
    share = ("--run.num-workers", str(max(len(host.workers), config.run.num_workers)))
    jobs: list[Job] = []
    if host.role == "trainer":
        words = (PYTHON, "bin/trainer", *options, *share)
        jobs.append(Job(f"{host.name}-trainer", words, env, str(config.run_folder)))
    for name in host.generators:
        words = (PYTHON, "bin/generator", *options, "--generator.name", name, *share)
        jobs.append(Job(name, words, env))
    return jobs


def settings_options(host: Host, config: Config) -> list[str]:
    options = {
        "--weights.dir": host.weights_dir,
        "--model.device": host.device,
        "--security.keys": str(KEYS) if config.security.keys else None,
        "--security.token-file": str(TOKEN) if token_file(config) else None,
    }
    changes = [word for name, value in options.items() if value for word in (name, value)]
    return ["@", str(settings_file(config)), *changes]


def _probe_problem(host: Host, result: Result) -> str | None:
    """Why the host cannot run workers, from the output of PROBE; None if it can."""
    facts = dict(line.split("=", 1) for line in result.stdout.splitlines() if "=" in line)
    noise, python, _ = result.stdout.partition("python=")
    if result.returncode or not python:
        return f"the probe failed: {ssh.last_line(result)}"
    if noise:
        return (
            f"its shell prints {noise.strip()[:40]!r} before each command, which breaks rsync; "
            "begin ~/.bashrc (or ~/.zshenv) with: case $- in *i*) ;; *) return ;; esac"
        )
    version = facts["python"]  # or the error of a command that does not run
    is_version = re.fullmatch(r"\d+\.\d+\.\d+", version) is not None
    if not is_version or tuple(map(int, version.split("."))) < (3, 11):
        return (
            f"{host.python} does not run Python 3.11 or later ({version}); "
            "set python = to a newer Python, or install one"
        )
    if host.folder is None:
        return None
    for program in ("rsync", "make"):
        if not facts.get(program):
            return f"there is no {program}; install it there ({ssh.package_hint(program)})"
    if facts.get("full") and not facts.get("ours"):
        return (
            f"{host.folder} holds files that bin/lan did not put there; choose another dir, "
            f"or allow overwriting it: mkdir {host.folder}/.lan"
        )
    if not facts.get("writable"):
        return f"{host.folder} cannot be written; choose another dir"
    needed = 200 if facts.get("ready") else 3000  # MB; the environment has torch
    free = int(facts["free"] or 0) // 1024  # df prints KiB
    if free < needed:
        return (
            f"the disk of {host.folder} is full: {free} MB free, {needed} MB needed; "
            "make room, or choose a dir on another disk"
        )
    return None


def _doctor_problem(result: Result) -> str | None:
    if result.returncode == 0:
        return None
    last_line = result.stdout.strip().rpartition("\n")[2]
    if not last_line.startswith('{"checks"'):
        return f"bin/doctor failed: {ssh.last_line(result)}"
    checks: list[dict[str, object]] = json.loads(last_line)["checks"]
    failed = [check for check in checks if not check["ok"]]
    return " / ".join(f"{check['name']}: {check['detail']}; {check['remedy']}" for check in failed)
