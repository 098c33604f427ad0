"""The front door: train a model, watch a run and talk to its policy, from Python.

`train` starts the same programs as `bin/lan local`, in processes of their own. Everything that
`Run` returns is read from the files of the run.
"""

from __future__ import annotations

import atexit
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import tomli_w

from peralta_zmq.atomic_files import is_held, replace_file
from peralta_zmq.config import RESOLVED, Config, load_config, load_resolved
from peralta_zmq.config.programs import program_command
from peralta_zmq.config.schema import known_fields
from peralta_zmq.errors import ConfigError, RunError, printable
from peralta_zmq.observe.dashboard.run_files import Tail
from peralta_zmq.observe.metrics import (
    ANSWERS,
    EVALUATIONS,
    EVENTS,
    LOCK,
    METRICS,
    SAMPLES,
    Row,
    number,
    read_rows,
)
from peralta_zmq.observe.run_state import SESSION_STARTS, newest_session
from peralta_zmq.observe.terminal import CellDisplay, Terminal, in_notebook
from peralta_zmq.observe.verdict import Verdict, verdict

if TYPE_CHECKING:
    from peralta_zmq.policy import Policy

Data: TypeAlias = "str | PathLike[str] | Iterable[Mapping[str, Any]]"
Reward: TypeAlias = "str | Callable[..., Any]"
INPUTS = "inputs"  # folder in the run folder with the rows, the function and the settings
SETTINGS, PID = "settings.toml", "pid"
LOG = Path("logs") / "run.log"  # in the run folder: output of the trainer and the supervisor
# `score` is the object that was pickled, so that its name and its parameters are those of the user.
LOADER = """\
from pathlib import Path

import cloudpickle

score = cloudpickle.loads(Path(__file__).with_suffix(".pkl").read_bytes())
"""


def train(
    model: str | PathLike[str],
    data: Data | None = None,
    reward: Reward | None = None,
    *,
    name: str | None = None,
    eval_data: Data | None = None,
    generators: int = 1,
    config: str | PathLike[str] | None = None,
    **settings: Any,
) -> Run:
    """Start a run on this machine and return it; `Run.wait` waits for its end.

    `model` is a Hugging Face folder or name. `data` are rows (mappings with a prompt and any other
    columns, also a `datasets.Dataset`), or a file or folder as in `data.train`; `eval_data` are
    held-out ones. `reward` is a function as in docs/custom.md, also one that is defined in a cell
    of a notebook, or a text as in `task.reward`. `generators` are started here; with 0, the run
    waits for those of other machines. Other settings are those of docs/config.md, by their name
    (`max_steps=200`), or by section where several have that name (`eval={"interval": 10}`).

    With the `name` of an existing run, continues it. Returns when the trainer has accepted its
    settings, model and data. Raises ConfigError for wrong settings, and RunError if the trainer
    ends before that, with its message.
    """
    given = _by_section(settings)
    with _settings_file(given) as words:
        base = load_config("train", [*_file_words(config), *words])
    given.setdefault("model", {})["name"] = os.fspath(model)
    run: dict[str, Any] = given.setdefault("run", {})
    run["dir"] = base.run.dir
    chosen = name or run.get("name")
    claimed = None if chosen else _claim_folder(Path(run["dir"]))
    run["name"] = claimed.name if claimed else str(chosen)
    inputs = Path(run["dir"]).resolve() / run["name"] / INPUTS
    try:
        with tempfile.TemporaryDirectory() as staged:  # until the settings are known to be right
            for leaf, rows in (("train", data), ("eval", eval_data)):
                if rows is not None:
                    given.setdefault("data", {})[leaf] = _data_file(
                        rows, Path(staged) / f"{leaf}.jsonl", inputs
                    )
            if reward is not None:
                given.setdefault("task", {})["reward"] = _reward_name(reward, Path(staged), inputs)
            return _start(config, given, generators, Path(staged))
    finally:
        if claimed is not None:
            with suppress(OSError):  # it is not empty
                claimed.rmdir()


def load_run(folder: str | PathLike[str]) -> Run:
    """Return the run in a folder, or with a name in `runs`. Raises ConfigError if there is none."""
    for place in (Path(folder), Path("runs") / folder):
        if (place / RESOLVED).is_file():
            return Run(place)
    raise ConfigError(f"{os.fspath(folder)} is no run: it has no {RESOLVED}")


def open_policy(
    source: Run | str | PathLike[str], step: int | None = None, **settings: Any
) -> Policy:
    """Open a model, or the newest published weights of a run, or those of a step, to sample.

        with pz.open_policy("runs/demo") as policy:
            print(policy.chat("add 2 to the product of 3 and 4."))
            groups = policy.sample(["add 1 to 2.", "add 2 to 3."], n=8)

    `source` is a Run, its folder or name, or a model as in `train`; `settings` as in `train`, e.g.
    `slots=8`. Raises ConfigError or StoreError if it cannot be opened.
    """
    from peralta_zmq.policy import Policy  # imports torch
    from peralta_zmq.trainer.evaluate_model import load_target

    target = str(source.folder if isinstance(source, Run) else os.fspath(source))
    with _settings_file(settings) as words:
        config, run = load_target(target, step, words)
    return Policy(config, run, step)


class Run:
    """A run: its folder, and its processes if this Python process has started them.

    Runs that still work when this process ends are stopped, and can be continued.
    """

    def __init__(
        self, folder: Path, process: subprocess.Popen[bytes] | None = None, first_byte: int = 0
    ) -> None:
        """`first_byte` is where the output of `process` begins in LOG."""
        self.folder = folder
        self._process = process
        self._first_byte = first_byte

    def __repr__(self) -> str:
        step = self.step
        state = "running" if self.is_running else "complete" if self.is_complete else "stopped"
        return f"<Run {self.folder}: {state}, step {step} of {self.config.train.max_steps}>"

    @property
    def config(self) -> Config:
        """All settings of the run, also those that follow the model and the data."""
        return load_resolved("train", self.folder)

    @property
    def step(self) -> int:
        """Number of training steps that were taken."""
        rows = self.metrics()
        return int(number(rows[-1], "step")) if rows else 0

    @property
    def is_running(self) -> bool:
        """Whether a trainer works on this run, here or in another process of this machine."""
        is_started = self._process is not None and self._process.poll() is None
        return is_started or bool(is_held(self.folder / LOCK))

    @property
    def is_complete(self) -> bool:
        return newest_session(read_rows(self.folder / EVENTS)).is_complete

    @property
    def verdict(self) -> Verdict:
        """The bottleneck or the fault of the run in one sentence, with advice."""
        now = time.time() if self.is_running else None
        return verdict(self.metrics(), read_rows(self.folder / EVENTS), now=now)

    def wait(self, timeout: float | None = None, *, show: bool = True) -> Run:
        """Wait until the run ends, and return it; `show` its progress in terminal or notebook.

        Ctrl-C, or the stop button of a notebook, ends the wait and not the run. Raises RunError if
        the run ends with an error, and TimeoutError after `timeout` seconds.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        display = CellDisplay() if show and in_notebook() else None
        stream = sys.stdout if show else io.StringIO()
        max_steps = self.config.train.max_steps
        rows = Tail(self.folder / METRICS, sys.maxsize)
        events = Tail(self.folder / EVENTS, sys.maxsize)
        recent: deque[Row] = deque(maxlen=64)
        known_events: list[Row] = []
        with Terminal(max_steps, stream, run=self.folder.name, live=display) as terminal:
            is_over = False
            while not is_over:
                is_over = not self.is_running  # then the rows that follow are the last ones
                known_events += events.read()
                while new := rows.read():
                    recent.extend(new)
                    for row in new[:-1]:
                        terminal.step(row)
                    now = None if is_over else time.time()
                    terminal.step(new[-1], verdict(list(recent), known_events, now=now))
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.folder} still runs after {timeout:g} s")
                if not is_over:
                    time.sleep(0.2)
            terminal.stall(self.verdict, now=time.time())  # verdict of the whole run
        if self._process is not None and self._process.returncode:
            raise RunError(_last_lines(self.folder, self._first_byte))
        return self

    def stop(self) -> None:
        """Let the trainer finish the step that it is computing, and save.

        `train` with this name continues the run. Raises RunError if the run was started by another
        process, which has to stop it.
        """
        process = self._process
        if process is None:
            if self.is_running:
                pid = self.folder / INPUTS / PID
                hint = f", or: kill -INT {pid.read_text()}" if pid.is_file() else ""
                raise RunError(f"{self.folder} was started by another process; stop it there{hint}")
            return
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(90.0)  # seconds for the trainer to finish its step and save
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # the second signal ends all processes
            process.wait()

    def metrics(self) -> list[Row]:
        """One mapping per training step: metric name -> number (docs/metrics.md)."""
        rows = read_rows(self.folder / METRICS)
        return list({row.get("step"): row for row in rows}.values())  # the last after a roll-back

    def frame(self) -> Any:
        """`metrics` as a pandas.DataFrame with one row per step."""
        pandas: Any = importlib.import_module("pandas")
        return pandas.DataFrame(self.metrics(), columns=None if self.step else ["step"]).set_index(
            "step"
        )

    def samples(self, step: int | None = None) -> list[Row]:
        """The sampled groups of a step, of all steps without one: prompt, texts, rewards."""
        rows = read_rows(self.folder / SAMPLES)
        return [row for row in rows if step is None or row["step"] == step]

    def evaluations(self) -> list[Row]:
        """The evaluations on held-out problems so far: step, accuracy, standard error."""
        rows = read_rows(self.folder / EVALUATIONS)
        return [{key: row[key] for key in row if key != "answers"} for row in rows]

    def answers(self, step: int | None = None) -> list[Row]:
        """The answers to the held-out problems in the evaluation of a step, or in all."""
        rows = read_rows(self.folder / ANSWERS)
        return [row for row in rows if step is None or row["step"] == step]

    def open_policy(self, step: int | None = None) -> Policy:
        return open_policy(self, step)

    def chat(self, messages: str | Sequence[Mapping[str, str]], **sampling: Any) -> str:
        """Answer of the newest weights to a question or to a list of messages."""
        with self.open_policy() as policy:
            return policy.chat(messages, **sampling)

    def evaluate(self, step: int | None = None, **settings: Any) -> Row:
        """Answer the held-out problems with the newest weights, or those of a step.

        Returns the mean `reward`, its standard error `stderr` and the number `n` of problems.
        `settings` as in `train`, e.g. `eval={"num_examples": 20}`.
        """
        from peralta_zmq.environments.held_out import summarize
        from peralta_zmq.trainer.evaluate_model import evaluate_target  # imports torch

        with _settings_file(settings) as words:
            _, results = evaluate_target(str(self.folder), step, words)
        reward, stderr, _ = summarize(results)
        return {"reward": reward, "stderr": stderr, "n": len(results)}

    def export(self, folder: str | PathLike[str], step: int | None = None) -> Path:
        """Write the weights of a step, the newest without one, as a Hugging Face folder.

        LoRA adapters are merged into their base model. Raises StoreError if that is impossible.
        """
        from peralta_zmq.trainer.replay import export  # imports torch

        export(self.folder, step, Path(folder))
        return Path(folder)

    def fork(
        self,
        name: str | None = None,
        *,
        from_step: int | None = None,
        generators: int = 1,
        **settings: Any,
    ) -> Run:
        """Start a new run from the weights of a step, the newest without one.

        It has the settings of this run, changed by `settings`. Raises as `train`.
        """
        given = _by_section(settings)
        run: dict[str, Any] = given.setdefault("run", {})
        run["fork"] = str(self.folder.resolve())
        parent = Path(run.setdefault("dir", str(self.folder.parent)))
        run["name"] = name or _claim_folder(parent).name
        if from_step is not None:
            run["from_step"] = from_step
        return _start(self.folder / RESOLVED, given, generators)


def _start(
    file: str | PathLike[str] | None,
    given: Mapping[str, Any],
    generators: int,
    staged: Path | None = None,
) -> Run:
    """Start a run with settings of a config file and `given` ones; waits for its first event.

    Files in `staged` are moved into the run folder when the settings are known to be right.
    """
    if generators:
        program = [*program_command("lan"), "local"]
        given = {**given, "run": {**given["run"], "num_local_generators": generators}}
    else:
        program = program_command("trainer")
    words = _file_words(file)
    with _settings_file(given) as settings:
        folder = load_config("train", [*words, *settings]).run_folder
        if is_held(folder / LOCK):
            raise ConfigError(f"{folder} is running; load_run({str(folder)!r}) returns it")
        for name in (INPUTS, LOG.parent):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for source in (*(staged.iterdir() if staged else ()), Path(settings[-1])):
            replace_file(folder / INPUTS / source.name, source.read_bytes())
    words += ["@", str(folder / INPUTS / SETTINGS)]
    num_events = len(read_rows(folder / EVENTS))
    with (folder / LOG).open("ab") as log:
        first_byte = log.tell()
        process = subprocess.Popen(
            [*program, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # the stop button of a notebook does not end the run
        )
    run = Run(folder, process, first_byte)
    atexit.register(run.stop)
    try:
        replace_file(folder / INPUTS / PID, str(process.pid).encode())
        while process.poll() is None:
            events = read_rows(folder / EVENTS)[num_events:]
            if any(event.get("event") in SESSION_STARTS for event in events):
                return run
            time.sleep(0.2)
    except BaseException:  # the stop button: nobody would have a handle of the run
        run.stop()
        raise
    if process.returncode:
        raise RunError(_last_lines(folder, first_byte))
    return run


def _file_words(file: str | PathLike[str] | None) -> list[str]:
    return [] if file is None else ["@", os.fspath(file)]


@contextmanager
def _settings_file(settings: Mapping[str, Any]) -> Generator[list[str]]:
    """The words of a command line that name a temporary file with the settings."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / SETTINGS
        file.write_text(tomli_w.dumps(_by_section(settings)), "utf-8")
        yield ["@", str(file)]


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those that are None; paths become texts."""
    return {
        name: os.fspath(value) if isinstance(value, PathLike) else value
        for name, value in settings.items()
        if value is not None
    }


def _by_section(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by section; a leaf of [train] or [sampling], or of one section, may stand alone.

    Unknown names stay as they are: `load_config` explains them.
    """
    known = known_fields()
    given: dict[str, Any] = {}
    for name, value in _given(settings).items():
        owners = [section for section, leaves in known.items() if name in leaves]
        owners = [section for section in owners if section in ("train", "sampling")] or owners
        if name in known and isinstance(value, Mapping):
            given.setdefault(name, {}).update(_given(value))
        elif len(owners) == 1:
            given.setdefault(owners[0], {})[name] = value
        elif owners:
            choices = " or ".join(f"{section}={{'{name}': {value!r}}}" for section in owners)
            raise ConfigError(f"several sections have the setting {name}: write {choices}")
        else:
            given[name] = value
    return given


def _claim_folder(parent: Path) -> Path:
    for index in count(1):
        folder = parent / f"run-{index}"
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("unreachable")


def _data_file(data: Data, file: Path, inputs: Path) -> str:
    """The file or folder with the data; rows are written to `file`, which moves to `inputs`."""
    if isinstance(data, (str, PathLike)):
        return os.fspath(data)
    try:
        lines = [json.dumps(dict(row), allow_nan=False) for row in data]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"data: a row cannot be written as JSON ({error})") from None
    file.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return str(inputs / file.name)


def _reward_name(reward: Reward, folder: Path, inputs: Path) -> str:
    """The value of task.reward; a function is pickled to `folder`, which moves to `inputs`."""
    if isinstance(reward, str):
        return reward
    import cloudpickle

    (folder / "reward.pkl").write_bytes(cloudpickle.dumps(reward))
    (folder / "reward.py").write_text(LOADER, "utf-8")
    return f"{inputs / 'reward.py'}:score"


def _last_lines(folder: Path, first_byte: int) -> str:
    """The error of a run that has ended: the last line of its output that names one."""
    output = (folder / LOG).read_bytes()[first_byte:]
    lines = output.decode("utf-8", "replace").splitlines()
    errors = [line for line in lines if "error:" in line] or lines[-1:] or ["no output"]
    return printable(f"{errors[-1]} (all output: {folder / LOG})")
