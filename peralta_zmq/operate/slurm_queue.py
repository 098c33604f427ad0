"""Commands of Slurm that list jobs with their states, send signals, and cancel jobs.

Uses the text output of squeue, because its JSON output needs a plugin that not all clusters have.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from dataclasses import dataclass

from peralta_zmq.errors import ConfigError, printable
from peralta_zmq.operate import ssh

COMMANDS = ("sbatch", "squeue", "scancel", "scontrol")
POLL_SECONDS = 0.5  # between two calls of squeue that wait for the end of jobs
ENDED = {
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL"),
    *("DEADLINE", "OUT_OF_MEMORY", "REVOKED"),
}


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A line of squeue."""

    state: str  # as Slurm names it
    node: str
    reason: str  # why the job waits
    seconds: float  # since the start of the job

    @property
    def has_ended(self) -> bool:
        """True if the job has ended and is not queued again."""
        return self.state in ENDED


def find_jobs(jobs: Collection[str]) -> dict[str, JobStatus]:
    """Status by id of those jobs that Slurm lists. Raises ConfigError if squeue fails.

    Slurm lists an ended job for some minutes (MinJobAge).
    """
    if not jobs:
        return {}
    words = ("squeue", "--noheader", "--array", "--states=all", "--format=%F|%K|%T|%N|%r|%M")
    result = ssh.run(ssh.Command((*words, f"--jobs={','.join(array_ids(jobs))}")))
    if result.returncode and "Invalid job id" not in result.stderr:  # none is listed
        raise ConfigError(f"squeue: {ssh.last_line(result)}; is the Slurm controller running?")
    statuses = parse_squeue(result.stdout)
    return {job: statuses[job] for job in jobs if job in statuses}


def parse_squeue(text: str) -> dict[str, JobStatus]:
    """Parse lines ID|TASK|STATE|NODES|REASON|TIME of squeue; the key is ID or ID_TASK."""
    statuses: dict[str, JobStatus] = {}
    for line in text.splitlines():
        job, task, state, node, reason, elapsed = line.split("|")
        key = f"{job}_{task}" if task.isdigit() else job
        statuses[key] = JobStatus(state, node, reason, _seconds(elapsed))
    return statuses


def _seconds(elapsed: str) -> float:
    """Seconds of a time as squeue prints it, [DAYS-][HOURS:]MINUTES:SECONDS; 0 if invalid."""
    days, _, time_of_day = elapsed.rpartition("-")
    parts = [int(part) for part in time_of_day.split(":") if part.isdigit()]
    seconds = sum(part * 60**power for power, part in enumerate(reversed(parts)))
    return seconds + 86_400 * int(days if days.isdigit() else 0)


def array_ids(jobs: Collection[str]) -> list[str]:
    """Ids of the jobs and of whole arrays, since one command line cannot have thousands of ids."""
    return sorted({job.partition("_")[0] for job in jobs})


def wait_for_end(jobs: Collection[str], seconds: float) -> list[str]:
    """Wait up to `seconds` until the jobs have ended; returns those that have not."""
    deadline = time.monotonic() + seconds
    while True:
        statuses = find_jobs(jobs)
        active = [job for job, status in statuses.items() if not status.has_ended]
        if not active or time.monotonic() > deadline:
            return active
        time.sleep(POLL_SECONDS)


def signal_jobs(jobs: Collection[str], signal_name: str) -> None:
    """Send a signal to the processes of operate/slurm_job.py of the running jobs."""
    statuses = find_jobs(jobs)
    if running := [job for job, status in statuses.items() if status.state == "RUNNING"]:
        cancel("--batch", f"--signal={signal_name}", *running)


def cancel(*arguments: str) -> None:
    """Call scancel; prints an error."""
    result = ssh.run(ssh.Command(("scancel", *arguments)))
    if result.returncode:
        sys.stderr.write(f"scancel: {printable(ssh.last_line(result))}\n")


def read_settings() -> str:
    """The settings of the cluster, lines NAME = VALUE. Raises ConfigError."""
    result = ssh.run(ssh.Command(("scontrol", "show", "config")))
    if result.returncode:
        raise ConfigError(f"scontrol: {ssh.last_line(result)}; is the Slurm controller running?")
    return result.stdout
