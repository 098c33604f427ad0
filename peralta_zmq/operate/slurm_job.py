"""The process that Slurm starts on a node: runs one worker and restarts it after a crash.

A worker is the trainer or one generator. `python -m peralta_zmq.operate.slurm_job RUN CONFIG KIND
NUMBER` is the last line of the job scripts (slurm_submit.py). RUN is the run folder, CONFIG the
settings file; KIND NUMBER is `trainer` and its ranks on each node, or `generator` and the number of
generators. The job's state is a file in the run folder, which bin/lan reads on another machine.

Signals: SIGTERM stops the worker. Slurm sends it (scancel, preemption) to the worker as well, which
then gets SIGINT from here, because a second SIGTERM would end it at once. SIGUSR1, which Slurm
sends before the time limit, stops the worker and queues the job again. SIGUSR2 (bin/lan restart)
restarts the worker.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from peralta_zmq.atomic_files import replace_file
from peralta_zmq.config.programs import program_command
from peralta_zmq.errors import EXIT_ERROR, prepare_streams, printable
from peralta_zmq.operate.process_group import (
    ProcessGroup,
    Worker,
    recorder,
    supervise,
    write_output,
)
from peralta_zmq.operate.supervisor import rotate_log

# Starts a worker that ignores this module's signals, which srun sends to all processes of a job.
WITHOUT_SIGNALS = ("/bin/sh", "-c", "trap '' USR1 USR2; exec \"$@\"", "sh")
TRAINER = "trainer"  # name of the trainer as a worker
STATES, LOGS = Path("slurm"), Path("logs")  # in the run folder; STATES has all files of the jobs
WARNING_SECONDS = 120  # from SIGUSR1 to the time limit, or up to 60 s more
# From SIGUSR1 on: when the job is queued again, also if the worker has not ended, and until when
# that is tried again after an error.
REQUEUE_SECONDS, LAST_REQUEUE_SECONDS = 90.0, 115.0
RETRY_SECONDS, COMMAND_SECONDS = 5.0, 10.0  # between two tries; for one of them
CHECK_SECONDS = 30.0  # between two checks of a generator's job whether the trainer has ended
# Ports of torchrun's rendezvous: below the ephemeral ports of Linux, different for most jobs.
FIRST_RENDEZVOUS_PORT, NUM_RENDEZVOUS_PORTS = 15_000, 15_000


@dataclass(frozen=True, slots=True)
class JobState:
    """State of a worker, written by its job; the file also shows that the run folder is shared."""

    job: str  # ID or ARRAY_TASK
    node: str
    restarts: int = 0  # by Slurm, after crashes and by `bin/lan restart`
    code: int | None = None  # exit code; None until the worker has ended
    stopped: bool = False  # True if a signal ended the worker


def state_file(run_folder: Path, name: str) -> Path:
    """File with the state of a worker."""
    return run_folder / STATES / f"{name}.json"


def log_file(run_folder: Path, name: str) -> Path:
    """File to which Slurm writes the output of a worker's job."""
    return run_folder / LOGS / f"{name}.log"


def read_state(run_folder: Path, name: str, job: str | None = None) -> JobState | None:
    """The state of a worker; None if this job has not written one or it cannot be read.

    Without `job` it may be of any job.
    """
    file = state_file(run_folder, name)
    with suppress(OSError, ValueError, TypeError):
        if not file.exists():
            os.listdir(file.parent)  # an NFS client then looks for the file again
        state = JobState(**json.loads(file.read_text("utf-8")))
        return state if job in (None, state.job) else None
    return None


def has_run_ended(run_folder: Path) -> bool:
    """True if the trainer has completed the run or failed; not if a signal stopped it."""
    state = read_state(run_folder, TRAINER)
    return state is not None and state.code is not None and not state.stopped


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the worker of this job to its end; returns its exit code."""
    run, config_file, kind, number = arguments
    run_folder = Path(run)
    if not Path(config_file).is_file():
        sys.stderr.write(
            f"{config_file} is missing on {socket.gethostname()}; mount the folder of the run on "
            "every node, under the same path\n"
        )
        return EXIT_ERROR
    if kind == TRAINER:
        name, command = kind, trainer_command(config_file, int(number), environment)
    else:
        name = generator_name(environment["SLURM_ARRAY_TASK_ID"])
        if has_run_ended(run_folder):
            sys.stdout.write(_ended_text(name))
            return 0
        command = generator_command(config_file, int(number), environment)
    return Job(run_folder, name, command, environment).run()


def _ended_text(name: str) -> str:
    return f"{name}: the trainer has ended; nothing to do\n"


def generator_name(index: int | str) -> str:
    """Name of a generator: in its messages, of its key, log and state."""
    return f"generator-{index}"


def trainer_command(
    config_file: str, num_ranks: int, environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Command of the trainer's `num_ranks` ranks on this node; torchrun's, if there are several."""
    address, num_nodes = environment["PERALTA_ADDRESS"], int(environment["SLURM_JOB_NUM_NODES"])
    arguments = ("@", config_file, "--wire.host", address)
    program = program_command("trainer")
    if num_nodes * num_ranks == 1:
        return (*program, *arguments)
    port = FIRST_RENDEZVOUS_PORT + int(environment["SLURM_JOB_ID"]) % NUM_RENDEZVOUS_PORTS
    torchrun = (
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(num_nodes)),
        *("--node-rank", environment["SLURM_NODEID"], "--nproc-per-node", str(num_ranks)),
        *("--master-addr", address, "--master-port", str(port)),
    )
    return (*torchrun, program[-1], *arguments)


def generator_command(
    config_file: str, count: int, environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Command of the generator of this task of the job array."""
    index = environment["SLURM_ARRAY_TASK_ID"]
    identity = ("--generator.name", generator_name(index), "--generator.index", index)
    sharing = ("--generator.count", str(count))
    return (*program_command("generator"), "@", config_file, *identity, *sharing)


def _job_id(environment: Mapping[str, str]) -> str:
    """Id of this job as Slurm's commands take it: ID, or ARRAY_TASK for a task of an array."""
    if array := environment.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]


class Job:
    """Supervises the worker of this job; the first node of a job writes its state."""

    def __init__(
        self,
        run_folder: Path,
        name: str,
        command: tuple[str, ...],
        environment: Mapping[str, str],
    ) -> None:
        self._worker, self._run_folder = Worker(name, (*WITHOUT_SIGNALS, *command)), run_folder
        self._file, self._log = state_file(run_folder, name), log_file(run_folder, name)
        self._record_in_run = recorder(run_folder)
        self._is_first_node = environment.get("SLURM_NODEID", "0") == "0"
        self._state = JobState(
            _job_id(environment),
            environment["SLURMD_NODENAME"],
            int(environment.get("SLURM_RESTART_COUNT", 0)),
        )
        self._signal = 0  # the latest of SIGUSR1 and SIGUSR2
        # After SIGUSR1: next and last try to queue the job again, in monotonic seconds.
        self._requeue_at = self._requeue_until = float("inf")
        self._is_interrupted = False  # a signal has stopped the worker
        self._check_at = time.monotonic() + CHECK_SECONDS

    def run(self) -> int:
        """Run the worker until it ends or fails; returns its exit code."""
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._stop_worker)
        self._write_state()
        while True:
            code = supervise(
                [self._worker],
                record=self._record,
                on_tick=self._on_tick,
                stop_signal=signal.SIGINT,
            )
            if self._signal != signal.SIGUSR2:
                break
            self._signal = 0
            self._write_state(restarts=self._state.restarts + 1)
        # Above 128: the signal found no running worker.
        self._write_state(code=code, stopped=self._is_interrupted or code > 128)
        while self._requeue_at < float("inf"):
            self._requeue()
            time.sleep(RETRY_SECONDS)
        return code

    def _stop_worker(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        if number == signal.SIGUSR1 and self._is_first_node:
            self._requeue_at = time.monotonic() + REQUEUE_SECONDS
            self._requeue_until = time.monotonic() + LAST_REQUEUE_SECONDS
        os.kill(os.getpid(), signal.SIGTERM)  # handled by `supervise`

    def _requeue(self) -> None:
        """Queue this job again, after which Slurm ends it; an error is tried again."""
        now, self._requeue_at = time.monotonic(), float("inf")
        name, job = self._worker.name, self._state.job
        if name != TRAINER and has_run_ended(self._run_folder):
            return
        write_output(sys.stdout, "the time limit is near; queueing the job again\n")
        words = ("scontrol", "requeue", job)
        try:
            subprocess.run(words, capture_output=True, check=True, timeout=COMMAND_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            if now < self._requeue_until:
                self._requeue_at = now + RETRY_SECONDS
                return
            output = (getattr(error, "stderr", b"") or b"").decode(errors="replace").strip()
            reason = printable(output or str(error))
            write_output(
                sys.stdout,
                f"job {job} could not be queued again ({reason}); start it with "
                f"bin/lan restart {name}\n",
            )

    def _record(self, event: str, **fields: object) -> None:
        if event == "restart":
            self._write_state(restarts=self._state.restarts + 1)
        if self._worker.name == TRAINER and self._is_first_node:
            self._record_in_run(event, **fields)

    def _on_tick(self, group: ProcessGroup) -> None:
        self._is_interrupted = group.is_interrupted
        if time.monotonic() > self._requeue_at:  # the worker takes long to save
            self._requeue()
        if self._worker.name != TRAINER:
            self._check_trainer()
        if self._is_first_node:
            with suppress(OSError):
                rotate_log(self._log)

    def _check_trainer(self) -> None:
        """Stop a generator if the trainer has ended without it, or has failed."""
        if time.monotonic() < self._check_at:
            return
        self._check_at = time.monotonic() + CHECK_SECONDS
        if not self._is_interrupted and has_run_ended(self._run_folder):
            write_output(sys.stdout, _ended_text(self._worker.name))
            os.kill(os.getpid(), signal.SIGTERM)  # handled by `supervise`

    def _write_state(self, **changes: Any) -> None:
        self._state = replace(self._state, **changes)
        if not self._is_first_node:
            return
        latest = read_state(self._run_folder, self._worker.name, self._state.job)
        if latest is not None and latest.node != self._state.node:
            return  # Slurm had lost this node, and has started the job again on another one
        try:
            replace_file(self._file, json.dumps(asdict(self._state)).encode())
        except OSError as error:  # a full disk must not end the job
            write_output(sys.stderr, f"state of {self._worker.name} not written: {error}\n")


if __name__ == "__main__":
    prepare_streams()
    sys.exit(main(sys.argv[1:], os.environ))
