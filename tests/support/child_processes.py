"""Fork child processes that tests may kill from a server that has already imported the trainer."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

QWEN3 = "transformers.models.qwen3.modeling_qwen3"  # imported to load the embedded model
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["pytest", "peralta_zmq.trainer.replay", QWEN3])


def exit_code(function: Callable[..., None], *args: object, timeout: float = 120.0) -> int:
    """The exit code of a process that runs `function`; -N if signal N killed it."""
    child = FORKS.Process(target=function, args=args, daemon=True)
    child.start()
    child.join(timeout)
    if child.exitcode is None:
        child.kill()
        child.join()
        raise AssertionError(f"{args!r}: still running after {timeout:.0f} seconds")
    return child.exitcode
