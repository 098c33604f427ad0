"""The process with vLLM, with another program in its place; files and comparison of weights."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import torch
from engine_data import save_model, sharp_model

from peralta_zmq import models
from peralta_zmq.engines.vllm import process
from peralta_zmq.engines.vllm.core import differing
from peralta_zmq.engines.vllm.process import CoreError, CoreProcess
from peralta_zmq.engines.vllm.vllm_engine import saved
from peralta_zmq.errors import EngineProcessError, OutageError

PROGRAM = """
import os, subprocess, sys, time
from multiprocessing.connection import Connection

class OutOfMemoryError(RuntimeError): ...

class Core:
    def __init__(self, arguments, end_ids):
        if "code" in arguments: os._exit(arguments["code"])
        self.child = subprocess.Popen(["sleep", "99"])
    def pid_of_child(self): return self.child.pid
    def fail(self): raise OutOfMemoryError("no\\nmemory")
    def sleep(self): time.sleep(99)
    def step(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end: pass
        return seconds

connection, core = Connection(int(sys.argv[1])), None
while True:
    name, arguments = connection.recv()
    try:
        if name == "open": core, result = Core(*arguments), None
        else: result = getattr(core, name)(*arguments)
    except Exception as error: connection.send((type(error).__name__, str(error)))
    else: connection.send((None, result))
"""

COMPILES = """
import sys, time, torch, torch._dynamo
from peralta_zmq.engines.vllm import core

class Core:
    def __init__(self, arguments, end_ids): pass
    def step(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end: pass
    def compile(self, seconds):
        def backend(graph, inputs):
            self.step(seconds)
            return graph.forward
        return torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(1)).tolist()

core.Core = Core
core.main(int(sys.argv[1]))
"""
POLL_SECONDS = 0.1
MIN_STEPS = 3
SLOWDOWN = 20
SLOW = 1.5 * 7 * POLL_SECONDS  # seconds of a step


def started(program: str = PROGRAM, **arguments: int) -> CoreProcess:
    return CoreProcess(
        arguments, [], threads=1, program=program, poll_seconds=POLL_SECONDS, cpu_seconds=0.005,
        min_steps=MIN_STEPS, slowdown=SLOWDOWN, hang_polls=7,
    )  # fmt: skip


@pytest.fixture
def core() -> Iterator[CoreProcess]:
    core = started()
    yield core
    core.kill()


def assert_all_ended(core: CoreProcess, child: int) -> None:
    """The process and its own child have ended."""
    for pid in (core.pid, child):
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(9)
    with pytest.raises(EngineProcessError, match="was killed by SIGKILL"):
        core.call("pid_of_child")


def test_exception_in_a_call_ends_the_process_with_its_kind(core: CoreProcess) -> None:
    child = core.call("pid_of_child")
    with pytest.raises(CoreError, match=r"^no memory$") as caught:
        core.call("fail")
    assert caught.value.kind == "OutOfMemoryError" and caught.value.is_out_of_memory
    assert_all_ended(core, child)


def test_memory_error_of_a_worker_process_is_recognized() -> None:
    """With tensor parallelism, vLLM raises the error of a worker as a RuntimeError."""
    text = "Worker failed with error 'CUDA out of memory. Tried to allocate 2 GiB', please check"
    assert CoreError("RuntimeError", text).is_out_of_memory
    assert not CoreError("RuntimeError", "Worker failed with error 'CUDA error'").is_out_of_memory


def test_killed_process_is_noticed_in_every_call(core: CoreProcess) -> None:
    os.kill(core.pid, signal.SIGKILL)
    message = r"was killed by SIGKILL \(perhaps the system was out of memory\)"
    for _ in range(2):
        with pytest.raises(EngineProcessError, match=message):
            core.call("step", 1.0)


def test_process_that_ends_at_its_start_raises_its_code() -> None:
    with pytest.raises(EngineProcessError, match="of vLLM ended with code 7"):
        started(code=7)


@pytest.mark.slow
def test_step_without_cpu_time_counts_as_hung_but_a_slow_one_does_not(core: CoreProcess) -> None:
    child = core.call("pid_of_child")
    assert core.call("step", SLOW, prompt_tokens=0) == SLOW
    started = time.monotonic()
    with pytest.raises(EngineProcessError, match="did not reply for 1 s"):
        core.call("sleep", prompt_tokens=0)
    assert time.monotonic() - started < 5 * SLOW
    assert_all_ended(core, child)


def test_step_counts_as_hung_after_more_cpu_time_than_a_slow_one(core: CoreProcess) -> None:
    usual = 0.02
    for _ in range(MIN_STEPS):
        core.call("step", usual, prompt_tokens=0)
    num_tokens = round(1.5 * SLOW / usual)
    assert core.call("step", SLOW, prompt_tokens=num_tokens) == SLOW
    started = time.monotonic()
    with pytest.raises(EngineProcessError, match="did not reply for 1 s"):
        core.call("step", 99, prompt_tokens=9)
    assert time.monotonic() - started < 5 * SLOW


@pytest.mark.slow
def test_slow_steps_raise_the_limit_of_the_next_ones(core: CoreProcess) -> None:
    usual = 1.5 * SLOW / SLOWDOWN
    for _ in range(MIN_STEPS):
        core.call("step", usual, prompt_tokens=0)
    assert core.call("step", SLOW, prompt_tokens=0) == SLOW


def test_process_ends_with_the_generator_without_a_traceback(tmp_path: Path) -> None:
    """Started where a file random.py would hide the module of Python."""
    (tmp_path / "random.py").write_text("raise ImportError('hidden')")
    ours, theirs = socket.socketpair()
    core = subprocess.Popen(
        [sys.executable, "-c", process.PROGRAM, str(theirs.fileno())], pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": os.getcwd()}, cwd=tmp_path, start_new_session=True,
        stdin=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    theirs.close()
    with ours:
        connection = Connection(os.dup(ours.fileno()))
        connection.send(("missing", ()))
        assert connection.recv()[0] == "AttributeError"
        connection.close()
    with core:
        assert core.stderr is not None and core.stderr.read() == b""


@pytest.mark.slow
def test_compilation_in_a_step_does_not_count_as_hung() -> None:
    core = started(COMPILES)
    for _ in range(MIN_STEPS):
        core.call("step", 0.0, prompt_tokens=0)
    assert core.call("compile", SLOW, prompt_tokens=0) == [1.0]
    core.kill()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_step_that_waits_for_a_cpu_does_not_count_as_hung(core: CoreProcess) -> None:
    cpu = {min(os.sched_getaffinity(0))}
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for pid in (other.pid, core.pid):
            os.sched_setaffinity(pid, cpu)
        os.sched_setscheduler(core.pid, os.SCHED_IDLE, os.sched_param(0))
        if (group := Path(f"/proc/{core.pid}/autogroup")).exists():
            group.write_text("19")
        assert core.call("step", SLOW, prompt_tokens=0) == SLOW
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("prompt_tokens", [0, None])
def test_stopped_process_counts_as_hung(prompt_tokens: int | None, core: CoreProcess) -> None:
    os.kill(core.pid, signal.SIGSTOP)
    with pytest.raises(EngineProcessError, match="did not reply"):
        core.call("pid_of_child", prompt_tokens=prompt_tokens)


def test_method_that_computes_may_take_any_time(core: CoreProcess) -> None:
    assert core.call("step", SLOW) == SLOW


@pytest.mark.parametrize("reason", ["No such file", "File too large"])
def test_files_of_weights_that_cannot_be_written_are_an_outage(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, limits = models.weights_of(sharp_model()), resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = tmp_path / "missing" if reason == "No such file" else tmp_path
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    if folder == tmp_path:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OutageError, match=rf"for vLLM .* {reason}.* or set TMPDIR"):
            saved(weights).__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not any(tmp_path.iterdir())


def test_comparison_names_a_tensor_that_was_not_loaded(tmp_path: Path) -> None:
    save_model(sharp_model(), tmp_path)
    compare, model = partial(differing, str(tmp_path)), sharp_model()
    assert compare(model) is None
    assert compare(model.bfloat16()) is None  # vLLM samples in another dtype
    quantized = sharp_model()  # as with engine.vllm_args quantization = "fp8_per_block"
    weight = quantized.get_parameter("model.layers.1.mlp.down_proj.weight")
    weight.data = (weight.data / 2).to(torch.float8_e4m3fn)
    assert compare(quantized) is None
    stale = sharp_model()
    models.weights_of(stale)["model.layers.1.mlp.down_proj.weight"].add_(0.1)
    assert compare(stale) == "model.layers.1.mlp.down_proj.weight"
