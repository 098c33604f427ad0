"""The process that Slurm starts on a node: runs one worker and restarts it after a crash.

`python -m peralta_zmq.operate.slurm_job RUN CONFIG WORKER` is the last line of the job scripts
(slurm_commands.py). RUN is the run folder, CONFIG the settings file; WORKER is `generator`, or
`trainer` and the number of its ranks on each node.

Signals: SIGTERM stops the worker. Slurm sends it (scancel, preemption) to the worker as well, which
then gets SIGINT from here, because a second SIGTERM would end it at once. SIGUSR1, which Slurm
sends before the time limit, stops the worker and queues the job again. SIGUSR2 (bin/lan restart)
restarts the worker.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from peralta_zmq.config.programs import program_command
from peralta_zmq.errors import EXIT_ERROR, prepare_streams, printable
from peralta_zmq.operate import ssh, supervisor
from peralta_zmq.operate.process_group import ProcessGroup, Worker
from peralta_zmq.operate.supervisor import State, Supervisor
from peralta_zmq.operate.worker_logs import write_output

# Starts a worker that ignores this module's signals, which srun sends to all processes of a job.
WITHOUT_SIGNALS = ("/bin/sh", "-c", "trap '' USR1 USR2; exec \"$@\"", "sh")
TRAINER = "trainer"  # name of the trainer as a worker
STATES = Path("slurm")  # in the run folder, with all files of the jobs
WARNING_SECONDS = 120  # from SIGUSR1 to the time limit, or up to 60 s more


def state_file(run_folder: Path, name: str) -> Path:
    """File with the state of a worker, which also shows that the run folder is shared."""
    return run_folder / STATES / f"{name}.json"


def log_file(run_folder: Path, name: str) -> Path:
    """File to which Slurm writes the output of a worker's job."""
    return run_folder / "logs" / f"{name}.log"


def read_state(run_folder: Path, name: str, job: str | None = None) -> State | None:
    """The state of a worker; None if `job` (None = any) has not written one."""
    file = state_file(run_folder, name)
    with suppress(OSError):
        if not file.exists():
            os.listdir(file.parent)  # an NFS client then looks for the file again
    state = supervisor.read_state(file)
    return state if state and job in (None, state.job) else None


def has_run_ended(run_folder: Path) -> bool:
    """Whether the trainer has completed the run or failed; not if a signal stopped it."""
    state = read_state(run_folder, TRAINER)
    return state is not None and state.code is not None and not state.stopped


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    run, config_file, *worker = arguments
    run_folder = Path(run)
    if not Path(config_file).is_file():
        sys.stderr.write(
            f"{config_file} is missing on {socket.gethostname()}; mount the folder of the run on "
            "every node, under the same path\n"
        )
        return EXIT_ERROR
    if worker[0] == TRAINER:
        name = TRAINER
        command = trainer_command(config_file, int(worker[1]), environment)
    else:
        name = generator_name(environment["SLURM_ARRAY_TASK_ID"])
        if has_run_ended(run_folder):
            sys.stdout.write(_ended_text(name))
            return 0
        command = (*program_command("generator"), "@", config_file, "--generator.name", name)
    return Job(run_folder, name, command, environment).run()


def _ended_text(name: str) -> str:
    return f"{name}: the trainer has ended; nothing to do\n"


def generator_name(index: int | str) -> str:
    return f"generator-{index}"


def trainer_command(
    config_file: str, num_ranks: int, environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Command of the trainer's `num_ranks` ranks on this node; torchrun's, if there are several."""
    address = environment["PERALTA_ADDRESS"]
    num_nodes = int(environment["SLURM_JOB_NUM_NODES"])
    arguments = ("@", config_file, "--wire.host", address)
    program = program_command("trainer")
    if num_nodes * num_ranks == 1:
        return (*program, *arguments)
    # Below the ephemeral ports of Linux, and different for most jobs.
    port = 15_000 + int(environment["SLURM_JOB_ID"]) % 15_000
    torchrun = (
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(num_nodes)),
        *("--node-rank", environment["SLURM_NODEID"], "--nproc-per-node", str(num_ranks)),
        *("--master-addr", address, "--master-port", str(port)),
    )
    return (*torchrun, program[-1], *arguments)


class Job:
    """Supervises the worker of this job; the first node of a job writes its state."""

    def __init__(
        self,
        run_folder: Path,
        name: str,
        command: tuple[str, ...],
        environment: Mapping[str, str],
        *,
        requeue_seconds: float = 90.0,
        retry_seconds: float = 5.0,
        check_seconds: float = 30.0,
    ) -> None:
        """After SIGUSR1, the job is queued again when the worker has ended, or `requeue_seconds`.

        A generator checks every `check_seconds` whether the trainer has ended.
        """
        self._name = name
        self._run_folder = run_folder
        self._requeue_seconds = requeue_seconds
        self._retry_seconds = retry_seconds
        self._check_seconds = check_seconds
        self._is_first_node = environment.get("SLURM_NODEID", "0") == "0"
        restarts = int(environment.get("SLURM_RESTART_COUNT", 0))
        job = environment["SLURM_JOB_ID"]  # ID, or ARRAY_TASK, as Slurm's commands take it
        if array := environment.get("SLURM_ARRAY_JOB_ID"):
            job = f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
        node = environment["SLURMD_NODENAME"]
        self._supervisor = Supervisor(
            Worker(name, (*WITHOUT_SIGNALS, *command)),
            State(since=time.time(), restarts=restarts, job=job, node=node),
            file=state_file(run_folder, name) if self._is_first_node else None,
            log=log_file(run_folder, name) if self._is_first_node else None,
            run_folder=run_folder if self._is_first_node and name == TRAINER else None,
        )
        self._signal = 0  # the latest of SIGUSR1 and SIGUSR2
        self._requeue_at = float("inf")  # next try to queue the job again, in monotonic seconds
        self._is_interrupted = False  # a signal has stopped the worker
        self._check_at = time.monotonic() + check_seconds

    def run(self) -> int:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._stop_worker)
        self._supervisor.update()
        code = self._supervisor.run(on_tick=self._on_tick, stop_signal=signal.SIGINT)
        while self._signal == signal.SIGUSR2:
            self._signal = 0
            self._supervisor.update(restarts=self._supervisor.state.restarts + 1)
            code = self._supervisor.run(on_tick=self._on_tick, stop_signal=signal.SIGINT)
        # Above 128: the signal found no running worker.
        self._supervisor.update(code=code, stopped=self._is_interrupted or code > 128)
        while self._requeue_at < float("inf"):
            self._requeue()
            time.sleep(self._retry_seconds)
        return code

    def _stop_worker(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        if number == signal.SIGUSR1 and self._is_first_node:
            self._requeue_at = time.monotonic() + self._requeue_seconds
        os.kill(os.getpid(), signal.SIGTERM)  # handled by `supervise`

    def _requeue(self) -> None:
        """Queue this job again, after which Slurm ends it; an error is tried again."""
        self._requeue_at = float("inf")
        if self._name != TRAINER and has_run_ended(self._run_folder):
            return
        job = self._supervisor.state.job
        write_output(sys.stdout, f"the time limit is near; queueing job {job} again\n")
        result = ssh.run(ssh.Command(("scontrol", "requeue", job), seconds=10.0))
        if result.returncode:
            self._requeue_at = time.monotonic() + self._retry_seconds
            reason = printable(ssh.last_line(result))
            write_output(
                sys.stdout,
                f"job {job} could not be queued again yet ({reason}); if it ends, start it with "
                f"bin/lan restart {self._name}\n",
            )

    def _on_tick(self, group: ProcessGroup) -> None:
        now = time.monotonic()
        self._is_interrupted = group.is_interrupted
        if now > self._requeue_at:  # the worker takes long to save
            self._requeue()
        if self._name != TRAINER and now > self._check_at:
            self._check_at = now + self._check_seconds
            if not self._is_interrupted and has_run_ended(self._run_folder):
                write_output(sys.stdout, _ended_text(self._name))
                os.kill(os.getpid(), signal.SIGTERM)  # handled by `supervise`


if __name__ == "__main__":
    prepare_streams()
    sys.exit(main(sys.argv[1:], os.environ))
