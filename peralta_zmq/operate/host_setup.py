"""Steps that prepare a host and start its workers: probe, copy, install, settings, check.

Each function returns commands, which find the problem and its remedy in their own results.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

from peralta_zmq.config import Config
from peralta_zmq.config.hosts import Host, Hosts
from peralta_zmq.config.resolved import toml_text
from peralta_zmq.operate.doctor.machine_checks import OLDEST_PYTHON
from peralta_zmq.operate.ssh import (
    LONG_SECONDS,
    Command,
    Result,
    failure,
    on_host,
    package_hint,
    rsync_to,
)
from peralta_zmq.operate.supervisor import COPY_MARKER, FOLDER, Job, job_text

REPO = Path(__file__).resolve().parents[2]
# Neither copied to the host nor deleted there: files of one machine, and keys.
EXCLUDED = ("/.git", "/.venv", "/.venv-other", "/.lan", "/runs", "/keys", "*.secret", "*.public",
            "*.egg-info", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis")  # fmt: skip
INSTALL_MB, CODE_MB = 3000, 200  # free space for an environment with torch, and for the code alone
KEYS, TOKEN = FOLDER / "keys", FOLDER / "weights-token"
PYTHON = ".venv/bin/python"
# Seconds: the trainer answers other doctors for this long, a generator retries to reach it.
DOCTOR_WAIT = {"trainer": "900", "generator": "20"}
DOCTOR_SECONDS = 1800.0

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
    """A line of shell that runs in the project folder of the host."""
    return f"cd {host.folder or shlex.quote(str(REPO))} && {script}"


def supervisor_script(host: Host, *words: str) -> str:
    """A line of shell that sends a command to the supervisors of the host."""
    return in_project(host, f"{PYTHON} -m peralta_zmq.operate.supervisor {' '.join(words)}")


def probe(host: Host) -> list[Command]:
    """Check Python, rsync, make, free space and the folder; changes nothing."""
    folder = host.folder or shlex.quote(str(REPO))
    script = PROBE.format(folder=folder, python=shlex.quote(host.python))
    # As standard input of sh: the login shell may be another one.
    return [on_host(host, "sh -s", script, find_problem=partial(_probe_problem, host))]


def sync(host: Host, config: Config) -> list[Command]:
    """Copy the code; a marker file exists while the copy is incomplete.

    Deletes files only within the copied folders, and never runs or weights.
    """
    if host.folder is None:
        return []
    excluded = [f"--exclude={name}" for name in (*EXCLUDED, *run_patterns(host, config))]
    marker = f"{host.folder}/{COPY_MARKER}"
    make_marker = f"mkdir -p {host.folder}/{FOLDER} && touch {marker}"
    sources = sorted(str(path) for path in REPO.iterdir())
    make_failed = partial(failure, remedy="its folder cannot be made; choose another dir")
    remove_failed = partial(failure, remedy="run bin/lan sync again")
    return [
        on_host(host, make_marker, find_problem=make_failed),
        rsync_to(host, sources, f"{host.folder}/", "--delete", *excluded),
        on_host(host, f"rm -f {marker}", find_problem=remove_failed),
    ]


def run_patterns(host: Host, config: Config) -> list[str]:
    """rsync patterns for runs and weights inside the project folder of the host."""
    runs = os.path.normpath(config.run.dir)
    paths = [str(config.run_folder) if runs == "." else runs]
    paths += filter(None, (host.weights_dir, config.weights.dir))
    inner = (_path_in(host.folder or "", os.path.normpath(path))
             for path in paths if "://" not in path)  # fmt: skip
    return [re.sub(r"[*?[]", r"[\g<0>]", f"/{path}") for path in inner if path]


def _path_in(folder: str, path: str) -> str | None:
    """A path relative to a folder of the host; None if it lies elsewhere."""
    if not path.startswith(("/", "~")):
        return None if path.split("/")[0] in (".", "..") else path
    _, separator, inner = path.removeprefix("~").partition(f"/{folder.strip('~/')}/")
    return inner if separator else None


def install(host: Host) -> list[Command]:
    """`make setup`, which does nothing when nothing has changed."""
    if host.folder is None:
        return []
    script = in_project(host, f"make --no-print-directory setup PYTHON={shlex.quote(host.python)}")
    remedy = f"make setup failed; run it by hand in {host.folder} to see all of its output"
    find_problem = partial(failure, remedy=remedy)
    return [on_host(host, script, seconds=LONG_SECONDS, find_problem=find_problem)]


def send_settings(host: Host, config: Config) -> list[Command]:
    """Send the config, the password of the weights, and only the keys that this host needs."""
    script = in_project(host, f"mkdir -p {FOLDER} && cat > {settings_file(config)}")
    find_problem = partial(failure, remedy="the settings cannot be written; is the disk full?")
    steps = [on_host(host, script, toml_text(config), find_problem=find_problem)]
    folder = host.folder or REPO
    if token := token_file(config):
        steps.append(rsync_to(host, [str(token)], f"{folder}/{TOKEN}"))
    if keys := config.keys_folder:
        steps.append(rsync_to(host, key_files(host, keys), f"{folder}/{KEYS}/"))
    return steps


def settings_file(config: Config) -> Path:
    """Path of the settings on every host; new settings change the name, and so the job."""
    digest = hashlib.sha256(toml_text(config).encode()).hexdigest()
    return FOLDER / f"config-{digest[:12]}.toml"


def token_file(config: Config) -> Path | None:
    """The file with the password of the weights, if it exists on this machine."""
    path = Path(config.weights.token_file or "").expanduser()
    return path if path.is_file() else None


def key_files(host: Host, keys: Path) -> list[str]:
    """Trainer host: all public keys and its own secrets; generator host: the reverse."""
    if host.role == "trainer":
        public = sorted(str(path) for path in keys.glob("*.public"))
        names = ["trainer", *host.generators]
    else:
        public, names = [str(keys / "trainer.public")], host.generators
    return [*public, *(str(keys / f"{name}.secret") for name in names)]


def doctor(host: Host, config: Config) -> Command:
    """bin/doctor with the settings of the host.

    The doctor of the trainer answers the doctors of generators until its standard input is closed.
    """
    words = [PYTHON, "bin/doctor", "--json", "--role", host.role, "--wait", DOCTOR_WAIT[host.role],
             "@", str(settings_file(config)), *host_options(host, config)]  # fmt: skip
    if host.role == "generator":
        words += ["--generator.name", host.generators[0]]
    env = [f"{name}={value}" for name, value in host.env.items()]
    script = in_project(host, shlex.join(["env", *env, *words] if env else words))
    return on_host(host, script, seconds=DOCTOR_SECONDS, find_problem=_doctor_problem)


def supervisor_steps(host: Host, command: str, jobs: Sequence[Job]) -> list[Command]:
    """`check` that these jobs can be started, or `start` them."""
    lines = "".join(f"{job_text(job)}\n" for job in jobs)
    return [on_host(host, supervisor_script(host, command), lines)]


def jobs_of(host: Host, hosts: Hosts, config: Config) -> list[Job]:
    """The jobs of a host: its trainer first, if it has one, then its generators."""
    env = {"HF_HUB_OFFLINE": "1", **host.env}
    options = ["@", str(settings_file(config)), *host_options(host, config)]
    generators, num_workers = hosts.generators, str(len(host.workers))
    jobs = [
        Job(
            name,
            (PYTHON, "bin/generator", *options,
             "--generator.name", name, "--generator.index", str(generators.index(name)),
             "--generator.count", str(len(generators)), "--generator.num-workers", num_workers),
            env,
        )
        for name in host.generators
    ]  # fmt: skip
    if host.role == "trainer":
        command = (PYTHON, "bin/trainer", *options, "--train.num-workers", num_workers)
        jobs.insert(0, Job(f"{host.name}-trainer", command, env, str(config.run_folder)))
    return jobs


def host_options(host: Host, config: Config) -> list[str]:
    """Command-line options in which this host differs from the config."""
    options = {"--weights.dir": host.weights_dir, "--model.device": host.device,
               "--security.keys": str(KEYS) if config.security.keys else None,
               "--weights.token-file": str(TOKEN) if token_file(config) else None}  # fmt: skip
    return [word for name, value in options.items() if value for word in (name, value)]


def _probe_problem(host: Host, result: Result) -> str | None:
    facts = dict(line.split("=", 1) for line in result.out.splitlines() if "=" in line)
    if result.code or "python" not in facts:
        return f"the probe failed: {result.last_line}"
    if problem := _python_problem(host, facts["python"]):
        return problem
    if host.folder is None:
        return None
    for program in ("rsync", "make"):
        if not facts.get(program):
            return f"there is no {program}; install it there ({package_hint(program)})"
    if facts.get("full") and not facts.get("ours"):
        return (
            f"{host.folder} holds files that bin/lan did not put there; choose another dir, "
            f"or allow overwriting it: mkdir {host.folder}/.lan"
        )
    if not facts.get("writable"):
        return f"{host.folder} cannot be written; choose another dir"
    needed, free = CODE_MB if facts.get("ready") else INSTALL_MB, int(facts["free"] or 0) // 1024
    if free < needed:
        return (
            f"the disk of {host.folder} is full: {free} MB free, {needed} MB needed; "
            "make room, or choose a dir on another disk"
        )
    return None


def _python_problem(host: Host, version: str) -> str | None:
    try:
        numbers = tuple(map(int, version.split(".")))
    except ValueError:
        return f"{host.python} does not run ({version}); set python = to one of 3.10 or later"
    if numbers < OLDEST_PYTHON:
        return (
            f"{host.python} is Python {version}, and 3.10 or later is needed; "
            "set python = to a newer one, or install it"
        )
    return None


def _doctor_problem(result: Result) -> str | None:
    """The failed checks of a doctor."""
    if result.code == 0:
        return None
    lines = result.out.strip().splitlines()
    try:
        checks = cast("list[dict[str, object]]", json.loads(lines[-1])["checks"])
        failed = [f"{check['name']}: {check['detail']}; {check['remedy']}" for check in checks
                  if not check["ok"]]  # fmt: skip
    except (IndexError, ValueError, KeyError, TypeError):
        failed = []
    return " / ".join(failed) or f"bin/doctor failed: {result.last_line}"
