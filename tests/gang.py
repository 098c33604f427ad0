"""Several real ranks on this machine, each a process that speaks gloo over the loopback."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forks import FORKS

from tools.link_proxy import free_ports

DEADLINE = 50.0  # seconds


def start(
    folder: Path, job: Callable[..., Any], *arguments: Any, count: int = 2
) -> list[multiprocessing.process.BaseProcess]:
    """Start `job(*arguments)` on each rank; what it returns goes to `folder`."""
    port = free_ports()
    ranks = [
        FORKS.Process(target=_work, args=(folder, rank, count, port, job, arguments), daemon=True)
        for rank in range(count)
    ]
    for each in ranks:
        each.start()
    return ranks


def results(folder: Path, ranks: list[multiprocessing.process.BaseProcess]) -> list[Any]:
    """What the job returned on each rank; an exception is a RuntimeError here."""
    deadline = time.monotonic() + DEADLINE
    for each in ranks:
        each.join(max(0.0, deadline - time.monotonic()))
    hung = [each for each in ranks if each.is_alive()]
    for each in hung:
        each.kill()
        each.join()
    found = [torch.load(folder / f"rank_{rank}.pt") if (folder / f"rank_{rank}.pt").exists()
             else f"rank {rank} ended with {each.exitcode}"
             for rank, each in enumerate(ranks)]  # fmt: skip
    if failed := [each for each in found if isinstance(each, str)]:
        raise RuntimeError("\n".join(failed))
    return found


def on_ranks(folder: Path, job: Callable[..., Any], *arguments: Any, count: int = 2) -> list[Any]:
    """What `job(*arguments)` returns on each of so many ranks."""
    return results(folder, start(folder, job, *arguments, count=count))


def _work(
    folder: Path, rank: int, count: int, port: int, job: Callable[..., Any], arguments: Any
) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ |= {name: str(number) for name, number in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        found: Any = job(*arguments)
    except BaseException:  # noqa: BLE001 -- the test is told
        found = traceback.format_exc()
    torch.save(found, folder / f".{rank}.pt")
    os.rename(folder / f".{rank}.pt", folder / f"rank_{rank}.pt")
