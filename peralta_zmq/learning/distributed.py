"""Ranks of a data-parallel trainer: gloo on CPUs, NCCL with sharded parameters (FSDP2) on CUDA.

A rank is one process of the trainer; each computes its share of the micro-batches of a step. Rank 0
sends commands to the other ranks, as JSON and raw bytes, never as pickle. Parts of
torch.distributed are imported in the functions that use them: a torch build without them can still
train on one rank.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from peralta_zmq.errors import RankError

Module = TypeVar("Module", bound=torch.nn.Module)

COMMAND_TIMEOUT = timedelta(days=365)  # the next command may follow after any time


class SingleRank:
    """The only rank of a trainer of one process; its methods do nothing.

    `lockstep` is True if every rank must make the same number of forward and backward passes.
    """

    rank, world_size, lockstep = 0, 1, False

    def prepare(self, model: Module) -> Module:
        return model

    def all_reduce(self, tensor: Tensor) -> None:
        pass

    def sum_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        return dict(sums)

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        pass


def join(device: torch.device) -> DistributedRanks:
    """Join the process group that torchrun's environment variables describe.

    Raises RankError when another rank does not join.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with _rank_errors():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return DistributedRanks(device, shards=device.type == "cuda")


class DistributedRanks:
    """The ranks of torch's default process group, which must be initialized.

    Every rank makes the same calls in the same order; a method raises RankError when another rank
    is gone. With `shards` each rank holds a part of every parameter (FSDP2), else a full copy.
    `lockstep` is True with shards: each forward and backward pass gathers the parts of all ranks.
    """

    def __init__(self, device: torch.device, *, shards: bool) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.lockstep = shards
        self._device = device
        self._commands: Any = dist.new_group(backend="gloo", timeout=COMMAND_TIMEOUT)

    # Reductions

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over all ranks."""
        with _rank_errors():
            dist.all_reduce(tensor)

    def sum_metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Sum over all ranks, in rank order, of each named number; names may differ by rank."""
        content, total = json.dumps(sums).encode(), dict[str, float]()
        for rank in range(self.world_size):
            for name, value in json.loads(self._broadcast_bytes(content, source=rank)).items():
                total[name] = total.get(name, 0.0) + value
        return total

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Replace each parameter's gradient by its sum over all ranks.

        A rank without a gradient adds zero.
        """
        if self.lockstep:  # FSDP has summed them in the backward pass
            return
        counts = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
        self.all_reduce(counts)
        used = [p for p, count in zip(parameters, counts, strict=True) if count]
        for parameter in used:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        with _rank_errors():
            for work in [dist.all_reduce(parameter.grad, async_op=True) for parameter in used]:
                cast(Any, work).wait()

    # Parameters

    def prepare(self, model: Module) -> Module:
        """Copy rank 0's weights to all ranks; return `model`, or its sharded copy to train."""
        with _rank_errors():
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, 0)
        return self._sharded(copy.deepcopy(model)) if self.lockstep else model

    def _sharded(self, model: Module) -> Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self._device.type, (self.world_size,))
        layers = {str(name) for name in getattr(model, "_no_split_modules", None) or ()}
        modules = [module for module in model.modules() if module.__class__.__name__ in layers]
        for module in (*modules, model):
            sharded = fully_shard(module, mesh=mesh, reshard_after_forward=True)
            sharded.set_gradient_divide_factor(1.0)  # the loss divides by the totals of the step
            sharded.set_force_sum_reduction_for_comms(True)  # gloo has no averaging
        return model

    # Commands of rank 0

    def send_command(self, fields: Mapping[str, Any], payloads: Sequence[bytes] = ()) -> None:
        """Send a command to all other ranks. Only rank 0 calls it."""
        sizes = [len(payload) for payload in payloads]
        header = json.dumps({**fields, "sizes": sizes}).encode()  # contains no line break
        self._broadcast_bytes(b"".join([header, b"\n", *payloads]), group=self._commands)

    def receive_command(self) -> dict[str, Any]:
        """Wait for the next command; return its fields, with a list of bytes as "payloads".

        All ranks but 0 call it.
        """
        header, _, content = self._broadcast_bytes(b"", group=self._commands).partition(b"\n")
        fields, stream = json.loads(header), io.BytesIO(content)
        return {**fields, "payloads": [stream.read(size) for size in fields["sizes"]]}

    def _broadcast_bytes(self, content: bytes, *, source: int = 0, group: Any = None) -> bytes:
        """Return the content that rank `source` passed; the other ranks' content is not used."""
        size = torch.tensor([len(content)])
        with _rank_errors():
            dist.broadcast(size, source, group=group)
            received = torch.empty(int(size), dtype=torch.uint8)
            if self.rank == source:
                received = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            dist.broadcast(received, source, group=group)
        return received.numpy().tobytes()

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite these CPU tensors on all ranks with those of rank 0."""
        with _rank_errors():
            for tensor in tensors:
                dist.broadcast(tensor.reshape(-1).view(torch.uint8), 0)

    def close(self) -> None:
        """Leave the process group, after the last command."""
        dist.destroy_process_group()


Ranks: TypeAlias = SingleRank | DistributedRanks
SINGLE = SingleRank()


@contextmanager
def _rank_errors() -> Generator[None]:
    """Turn an error of torch.distributed into RankError."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rpartition("] ")[2].partition(". ")[0]
        raise RankError(
            f"another rank of this trainer is gone ({reason}); the same command resumes the run"
        ) from None


# Sharded tensors (DTensor). Each function is called on every rank, and returns an unsharded tensor
# unchanged.


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor on every rank."""
    return cast(Any, tensor).full_tensor() if _is_sharded(tensor) else tensor


def gather_tensor(tensor: Tensor, *, rank: int) -> Tensor:
    """Return a tensor in full on rank 0; a sharded one is moved to the CPU.

    The other ranks get an empty tensor instead of a sharded one. `rank` is that of this process.
    """
    if not _is_sharded(tensor):
        return tensor
    full = full_tensor(tensor)
    return full.cpu() if rank == 0 else full.new_empty(0)


def shard_tensor(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of a full tensor, with the device and sharding of `like`."""
    tensor = tensor.to(like.device)
    if not _is_sharded(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    layout: Any = like
    return distribute_tensor(tensor, layout.device_mesh, layout.placements, src_data_rank=None)


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")
