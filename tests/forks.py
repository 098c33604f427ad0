"""Processes that may be killed, of one that has imported torch: each starts in milliseconds."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["torch.distributed.tensor", "safetensors.torch", "pytest", "peralta_zmq.trainer"]
)


def exit_code(work: Callable[..., None], *args: object, within: float = 120.0) -> int:
    """Of a process that does `work`; negative for the signal that ended it."""
    child = FORKS.Process(target=work, args=args, daemon=True)
    child.start()
    child.join(within)
    if child.exitcode is None:
        child.kill()
        child.join()
        raise AssertionError(f"{args!r}: not at its end after {within:.0f} seconds")
    return child.exitcode
