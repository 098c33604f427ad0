"""Several real ranks on this machine, connected by gloo over the loopback, and their groups."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from child_processes import FORKS
from sample_data import siblings

from peralta_zmq.learning.distributed import DistributedRanks
from tools.link_proxy import free_ports

DEADLINE = 50.0  # seconds
GROUPS = [
    siblings(
        [1, 0, 0, number % 2],
        lengths=[3, 9, 1 + number % 7, 5],
        seed=number, group_number=number, num_prompt=4 + number % 5,
    )
    for number in range(20)
]  # fmt: skip


def start(
    folder: Path, job: Callable[..., Any], *arguments: Any, count: int = 2
) -> list[multiprocessing.process.BaseProcess]:
    """Start `job(*arguments)` on each rank; its results are saved in `folder`."""
    port = free_ports()
    ranks = [
        FORKS.Process(target=_work, args=(folder, rank, count, port, job, arguments), daemon=True)
        for rank in range(count)
    ]
    for process in ranks:
        process.start()
    return ranks


def results(folder: Path, ranks: list[multiprocessing.process.BaseProcess]) -> list[Any]:
    """The result of the job on each rank; raises RuntimeError if one failed."""
    deadline = time.monotonic() + DEADLINE
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    hung = [process for process in ranks if process.is_alive()]
    for process in hung:
        process.kill()
        process.join()
    outcomes = [torch.load(folder / f"rank_{rank}.pt") if (folder / f"rank_{rank}.pt").exists()
             else f"rank {rank} ended with {process.exitcode}"
             for rank, process in enumerate(ranks)]  # fmt: skip
    if failed := [outcome for outcome in outcomes if isinstance(outcome, str)]:
        raise RuntimeError("\n".join(failed))
    return outcomes


def on_ranks(folder: Path, job: Callable[..., Any], *arguments: Any, count: int = 2) -> list[Any]:
    """The results of `job(*arguments)` on `count` ranks."""
    return results(folder, start(folder, job, *arguments, count=count))


def join_sharded(device: torch.device) -> DistributedRanks:
    """Join the process group with sharded parameters, as on CUDA; replaces `distributed.join`."""
    dist.init_process_group("gloo")
    return DistributedRanks(device, shards=True)


def _work(
    folder: Path, rank: int, count: int, port: int, job: Callable[..., Any], arguments: Any
) -> None:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {name: str(number) for name, number in variables.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        outcomes: Any = job(*arguments)
    except BaseException:  # noqa: BLE001 -- reported to the test
        outcomes = traceback.format_exc()
    torch.save(outcomes, folder / f".{rank}.pt")
    os.rename(folder / f".{rank}.pt", folder / f"rank_{rank}.pt")
