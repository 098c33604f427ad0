"""What must be true of a host before anything starts there: looked at, copied, installed, checked.

Each step is a command and a judge of its result; problems come with their remedy. Knows shell and
the project's folders; decides nothing about the order, or about other hosts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from peralta_zmq.config import Config, toml_text
from peralta_zmq.config.hosts import Host, Hosts
from peralta_zmq.operate.ssh import LONG, Command, Result, RewardRunner, copy_to, on, program_on
from peralta_zmq.operate.supervisor import FOLDER, HALF_COPIED, Job, job_text

REPO = Path(__file__).resolve().parents[2]
# Never copied, and never deleted there: what belongs to one machine, and keys.
LEFT_OUT = ("/.git", "/.venv", "/.venv-other", "/.lan", "/runs", "/keys", "*.secret", "*.public",
            "*.egg-info", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis")  # fmt: skip
OLDEST = (3, 10)
NEW_MB, AGAIN_MB = 3000, 200  # free space for an environment with torch, and for the code alone
KEYS, TOKEN = FOLDER / "keys", FOLDER / "weights-token"
PYTHON = ".venv/bin/python"
KEEPER = f"{PYTHON} -m peralta_zmq.operate.supervisor"
NO_SPACE = "No space left"
NO_PROGRAM = 127  # what a shell ends with
DOCTOR_WAITS = {"trainer": "900", "generator": "20"}  # seconds: to answer, to be answered
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


@dataclass(frozen=True, slots=True)
class Step:
    """One command for one host; `judge` says what is wrong with its result."""

    command: Command
    judge: RewardRunner


def place(host: Host) -> str:
    """The project's folder on the host, as a shell there reads it."""
    return host.folder or shlex.quote(str(REPO))


def inside(host: Host, script: str) -> str:
    """A line of shell in the project's folder on the host."""
    return f"cd {place(host)} && {script}"


def probe(host: Host) -> list[Step]:
    """Is it there, with Python, rsync, make, room, and a folder of its own? Changes nothing."""
    script = PROBE.format(folder=place(host), python=shlex.quote(host.python))
    return [Step(program_on(host, script), lambda result: _probed(host, result))]


def sync(host: Host, config: Config) -> list[Step]:
    """Copy the code; a marker says so while it is half done.

    Only within the folders that are copied is anything deleted, and never what a run leaves.
    """
    if host.folder is None:
        return []
    excluded = [f"--exclude={name}" for name in (*LEFT_OUT, *left_by_runs(host, config))]
    mark = f"mkdir -p {host.folder}/{FOLDER} && touch {host.folder}/{HALF_COPIED}"
    sources = sorted(str(each) for each in REPO.iterdir())
    copied = copy_to(host, sources, f"{host.folder}/", "--delete", *excluded)
    return [
        Step(on(host, mark), _plain("cannot make its folder; choose another dir")),
        Step(copied, _copied),
        Step(on(host, f"rm -f {host.folder}/{HALF_COPIED}"), _plain("run bin/lan sync again")),
    ]


def left_by_runs(host: Host, config: Config) -> list[str]:
    """Patterns of rsync for the runs and weights that lie in the project's folder on the host."""
    runs = os.path.normpath(config.run.dir)
    kept = [str(config.run_folder) if runs == "." else runs]
    kept += filter(None, (host.weights_dir, config.weights.dir))
    inner = (_inside_of(host.folder or "", os.path.normpath(each))
             for each in kept if "://" not in each)  # fmt: skip
    return [re.sub(r"[*?[]", r"[\g<0>]", f"/{each}") for each in inner if each]


def _inside_of(folder: str, path: str) -> str | None:
    """A path as it is within a folder of the host; None when it lies elsewhere."""
    if not path.startswith(("/", "~")):
        return None if path.split("/")[0] in (".", "..") else path
    _, found, rest = path.removeprefix("~").partition(f"/{folder.strip('~/')}/")
    return rest if found else None


def install(host: Host) -> list[Step]:
    """`make setup`, which does nothing when nothing has changed."""
    if host.folder is None:
        return []
    script = inside(host, f"make --no-print-directory setup PYTHON={shlex.quote(host.python)}")
    remedy = f"make setup failed; run it there by hand in {host.folder} to see all of it"
    return [Step(on(host, script, seconds=LONG), _plain(remedy))]


def hand_over(host: Host, config: Config) -> list[Step]:
    """The settings, the password of the weights, and the keys that this host needs, no others."""
    settings, file = toml_text(config), settings_file(config)
    script = inside(host, f"mkdir -p {FOLDER} && cat > {file}")
    given = [Step(on(host, script, settings), _plain("cannot write there; is the disk full?"))]
    folder = host.folder or REPO
    if token := token_file(config):
        given.append(Step(copy_to(host, [str(token)], f"{folder}/{TOKEN}"), _copied))
    if keys := config.keys_folder:
        given.append(Step(copy_to(host, key_files(host, keys), f"{folder}/{KEYS}/"), _copied))
    return given


def settings_file(config: Config) -> Path:
    """Where the settings lie on every host: others lie elsewhere, and so make another job."""
    digest = hashlib.sha256(toml_text(config).encode()).hexdigest()
    return FOLDER / f"config-{digest[:12]}.toml"


def token_file(config: Config) -> Path | None:
    """The file with the password of the weights, where this machine has it."""
    path = Path(config.weights.token_file or "").expanduser()
    return path if path.is_file() else None


def key_files(host: Host, keys: Path) -> list[str]:
    """The trainer's host gets its secret and everybody's public half; a generator's the reverse."""
    if host.role == "trainer":
        every = sorted(str(each) for each in keys.glob("*.public"))
        mine = ["trainer", *host.generators]
    else:
        every, mine = [str(keys / "trainer.public")], host.generators
    return [*every, *(str(keys / f"{name}.secret") for name in mine)]


def doctor(host: Host, config: Config) -> Step:
    """bin/doctor there, with the settings of the host.

    The trainer's goes on, until its standard input ends, to answer those of the generators.
    """
    words = [PYTHON, "bin/doctor", "--json", "--role", host.role, "--wait", DOCTOR_WAITS[host.role],
             "@", str(settings_file(config)), *own_settings(host, config)]  # fmt: skip
    if host.role == "generator":
        words += ["--generator.name", host.generators[0]]
    settings = [f"{name}={value}" for name, value in host.env.items()]
    script = inside(host, shlex.join(["env", *settings, *words] if settings else words))
    return Step(on(host, script, seconds=DOCTOR_SECONDS), _examined)


def tell(host: Host, word: str, jobs: Sequence[Job]) -> list[Step]:
    """To the keeper there: `check` that these can be started, or `start` them, detached."""
    given = "".join(f"{job_text(job)}\n" for job in jobs)
    return [Step(on(host, inside(host, f"{KEEPER} {word}"), given), _plain(None))]


def jobs_of(host: Host, hosts: Hosts, config: Config) -> list[Job]:
    """What runs on a host: its trainer first, if it has one, then its generators."""
    env = {"HF_HUB_OFFLINE": "1", **host.env}
    own = ["@", str(settings_file(config)), *own_settings(host, config)]
    every, sharers = hosts.generators, str(len(host.workers))
    trainer = ("bin/trainer", *own, "--train.num-workers", sharers)
    jobs = [
        Job(
            name,
            (PYTHON, "bin/generator", *own,
             "--generator.name", name, "--generator.index", str(every.index(name)),
             "--generator.count", str(len(every)), "--generator.num-workers", sharers),
            env,
        )
        for name in host.generators
    ]  # fmt: skip
    if host.role == "trainer":
        run = str(config.run_folder)
        jobs.insert(0, Job(f"{host.name}-trainer", (PYTHON, *trainer), env, run))
    return jobs


def own_settings(host: Host, config: Config) -> list[str]:
    """Options in which this host differs from the others."""
    options = {"--weights.dir": host.weights_dir, "--model.device": host.device,
               "--security.keys": str(KEYS) if config.security.keys else None,
               "--weights.token-file": str(TOKEN) if token_file(config) else None}  # fmt: skip
    return [word for name, given in options.items() if given for word in (name, given)]


def _probed(host: Host, result: Result) -> str | None:
    found = dict(line.split("=", 1) for line in result.out.splitlines() if "=" in line)
    if result.code or "python" not in found:
        return f"cannot be looked at: {result.last_words}"
    if problem := _python_problem(host, found["python"]):
        return problem
    if host.folder is None:
        return None
    for program in ("rsync", "make"):
        if not found.get(program):
            return f"there is no {program}; install it there ({_package_hint(program)})"
    if found.get("full") and not found.get("ours"):
        return (
            f"{host.folder} holds files that bin/lan did not put there; choose another dir, "
            f"or let it be overwritten: mkdir {host.folder}/.lan"
        )
    if not found.get("writable"):
        return f"{host.folder} cannot be written; choose another dir"
    needed, free = AGAIN_MB if found.get("ready") else NEW_MB, int(found.get("free") or 0) // 1024
    if free < needed:
        return (
            f"the disk of {host.folder} is full: {free} MB free, {needed} MB needed; "
            "make room, or choose a dir on another disk"
        )
    return None


def _python_problem(host: Host, version: str) -> str | None:
    try:
        found = tuple(map(int, version.split(".")))
    except ValueError:
        return f"{host.python} does not run ({version}); set python = to one of 3.10 or later"
    if found < OLDEST:
        return (
            f"{host.python} is Python {version}, and 3.10 or later is needed; "
            "set python = to a newer one, or install it"
        )
    return None


def _package_hint(program: str) -> str:
    apple = "xcode-select --install" if program == "make" else f"brew install {program}"
    return f"apt install {program}, or {apple}"


def _copied(result: Result) -> str | None:
    if result.code == 0:
        return None
    if result.code == NO_PROGRAM:  # the host's own was looked for before
        return f"there is no rsync on this machine; install it ({_package_hint('rsync')})"
    text = f"copying stopped halfway (rsync code {result.code}: {result.last_words})"
    if NO_SPACE in result.err:
        return f"{text}; the disk is full: make room there, then the same command again"
    return f"{text}; the same command again goes on from there"


def _examined(result: Result) -> str | None:
    """The failing lines of the doctor."""
    if result.code == 0:
        return None
    lines = result.out.strip().splitlines()
    try:
        checks = cast("list[dict[str, object]]", json.loads(lines[-1])["checks"])
        failed = [f"{each['name']}: {each['detail']}; {each['remedy']}" for each in checks
                  if not each["ok"]]  # fmt: skip
    except (IndexError, ValueError, KeyError, TypeError):
        failed = []
    return " / ".join(failed) or f"bin/doctor failed: {result.last_words}"


def _plain(remedy: str | None) -> RewardRunner:
    """Anything but exit code 0 is a problem; its last line says which."""

    def judge(result: Result) -> str | None:
        if result.code == 0:
            return None
        return f"{result.last_words}; {remedy}" if remedy else result.last_words

    return judge
