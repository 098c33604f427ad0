"""Workers that are forks of their supervisor, in a Python process with one thread."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from real_programs import has_ended, until

DEADLINE = 20.0
# The programs that a fork can run.
PROGRAMS = """
import logging, os, signal, sys, time

def report():
    logging.basicConfig(format="%(message)s")
    logging.warning("logged")
    print(sys.argv, os.getsid(0) == os.getpid(), sys.stdin.read(), flush=True)
    return 3

def crash():
    os.kill(os.getpid(), signal.SIGKILL)

def raise_error():
    raise ValueError("broken")

def sleep():
    time.sleep(60)
"""
# Starts one fork and prints what happens to it. The supervisor's own logging has a handler.
SUPERVISOR = """
import logging, os, sys, threading
from peralta_zmq.operate.forks import ForkedProcess
logging.basicConfig(format="supervisor %(message)s")
pipe = os.pipe()
with open("log", "ab") as log:
    process = ForkedProcess("programs:" + sys.argv[1], (sys.executable, "bin/trainer", "--x", "1"),
                            guard_pipe=pipe, output=log)
print(process.pid, flush=True)
if sys.argv[1] == "sleep":
    sys.stdin.read()
    os._exit(0)
process.wait()
print(process.poll())
"""

# Checks the import of the libraries. Prints how often transformers took the list of a folder from
# its cache, and how many regular expressions a fork compiles when it loads its first model.
IMPORTER = """
import functools, os, re
os.environ.pop("HF_HUB_OFFLINE", None)
from peralta_zmq.operate import forks
original = functools.lru_cache
assert forks.import_libraries() and functools.lru_cache is original
from transformers.utils.import_utils import create_import_structure_from_path as listed
import huggingface_hub.constants
assert huggingface_hub.constants.HF_HUB_OFFLINE
print(listed.cache_info().hits, flush=True)
if os.fork() == 0:
    import torch
    from peralta_zmq import models
    compiled, compile = [], re.compile
    re.compile = lambda *args, **kwargs: compiled.append(args) or compile(*args, **kwargs)
    models.load_model(models.EMBEDDED, device=torch.device("cpu"), dtype=torch.float32)
    print(len(compiled), flush=True)
    os._exit(0)
assert os.wait()[1] == 0
"""


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        pytest.skip("forks on Linux only")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    Path("programs.py").write_text(PROGRAMS)


def supervised(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("program", "code"), [("report", 3), ("crash", -signal.SIGKILL), ("raise_error", 1)]
)
def test_exit_code_of_a_fork_is_that_of_its_program(program: str, code: int) -> None:
    output, _ = supervised(program).communicate(timeout=DEADLINE)
    assert int(output.split()[1]) == code


def test_fork_has_its_own_arguments_session_input_output_and_logging() -> None:
    supervised("report").communicate(timeout=DEADLINE)
    assert Path("log").read_text() == "logged\n['bin/trainer', '--x', '1'] True \n"


def test_transformers_is_imported_offline_and_does_its_work_once_for_all_forks() -> None:
    result = subprocess.run(
        [sys.executable, "-c", IMPORTER], capture_output=True, text=True, timeout=40
    )
    assert result.returncode == 0, result.stderr
    num_hits, num_compiled = map(int, result.stdout.split())
    assert num_hits > 400 and num_compiled < 400


def test_error_of_a_fork_is_in_its_log() -> None:
    supervised("raise_error").communicate(timeout=DEADLINE)
    assert "ValueError: broken" in Path("log").read_text()


def test_fork_is_listed_with_its_command_and_ends_with_its_supervisor() -> None:
    with supervised("sleep") as supervisor:
        assert supervisor.stdout and supervisor.stdin
        fork = psutil.Process(int(supervisor.stdout.readline()))
        until(lambda: fork.cmdline()[1:2] == ["bin/trainer"], seconds=DEADLINE)
        supervisor.kill()
        until(lambda: has_ended(fork.pid), seconds=DEADLINE)
