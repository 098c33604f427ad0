"""Ranks of a data-parallel trainer: gloo on CPUs, NCCL and FSDP2 on CUDA.

Rank 0 sends commands to the others, as JSON and raw bytes, never as pickle. Some modules of
torch.distributed are imported in the functions that use them: one rank can train with a torch build
that lacks them.
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


class SingleRank:
    """The only rank of a trainer: the methods of DistributedRanks without effect."""

    rank = 0
    world_size = 1
    lockstep = False

    def prepare(self, model: Module) -> Module:
        return model

    def all_reduce(self, tensor: Tensor) -> None:
        pass

    def all_gather(self, values: Tensor) -> Tensor:
        return values

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        pass


def join(device: torch.device) -> DistributedRanks:
    """Join the ranks that torchrun's variables describe; RankError if another one does not."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with _rank_errors():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return DistributedRanks(device, shards=device.type == "cuda")


class DistributedRanks:
    """The ranks of torch's default process group, which must be initialized.

    Every rank must make the same calls in the same order. A method raises RankError when another
    rank is gone. With `shards` each rank holds a shard of every parameter, else a full copy; ranks
    with shards are in `lockstep`, with equal numbers of forward and backward passes.
    """

    def __init__(self, device: torch.device, *, shards: bool) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.lockstep = shards
        self._device = device
        # The timeout is longer than any time between two commands.
        self._commands: Any = dist.new_group(backend="gloo", timeout=timedelta(days=365))

    # Reductions

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over all ranks."""
        with _rank_errors():
            dist.all_reduce(tensor)

    def all_gather(self, values: Tensor) -> Tensor:
        """Concatenate the values [n] of all ranks, in their order; n may differ."""
        counts = torch.zeros(self.world_size, dtype=torch.int64)
        counts[self.rank] = len(values)
        self.all_reduce(counts)
        gathered = values.new_zeros(int(counts.sum()))
        gathered.split(counts.tolist())[self.rank].copy_(values)
        self.all_reduce(gathered)
        return gathered

    def gather(self, value: Any) -> list[Any]:
        """The JSON value of each rank, on every rank."""
        content = json.dumps(value).encode()
        ranks = range(self.world_size)
        return [json.loads(self._broadcast_bytes(content, source=rank)) for rank in ranks]

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Replace each gradient by its sum over all ranks; a rank without one adds zero."""
        if self.lockstep:  # FSDP has summed the gradients in the backward pass
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
        """Copy rank 0's weights to all ranks; returns `model`, or with shards a sharded copy."""
        with _rank_errors():
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, 0)
        if not self.lockstep:
            return model
        # Buffers, such as the frozen base of LoRA adapters, are not sharded and never change.
        shared = {id(buffer): buffer for buffer in model.buffers()}
        return self._sharded(copy.deepcopy(model, cast("dict[int, Any]", shared)))

    def _sharded(self, model: Module) -> Module:
        """Shard each layer of `model`, then all its other parameters, in place."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self._device.type, (self.world_size,))
        layer_types = {str(name) for name in getattr(model, "_no_split_modules", None) or ()}
        layers = [module for module in model.modules() if type(module).__name__ in layer_types]
        for module in (*layers, model):
            sharded = fully_shard(module, mesh=mesh, reshard_after_forward=True)
            sharded.set_gradient_divide_factor(1.0)  # the loss divides by totals of all ranks
            sharded.set_force_sum_reduction_for_comms(True)  # gloo has no averaging
        return model

    # Commands of rank 0

    def send_command(self, fields: Mapping[str, Any], payloads: Sequence[bytes] = ()) -> None:
        """Send a command to all other ranks. Only rank 0 calls it."""
        sizes = [len(payload) for payload in payloads]
        header = json.dumps({**fields, "sizes": sizes}).encode()  # JSON without line breaks
        self._broadcast_bytes(b"".join([header, b"\n", *payloads]), group=self._commands)

    def receive_command(self) -> dict[str, Any]:
        """Wait for rank 0's next command; return its fields, with its payloads as "payloads"."""
        header, _, content = self._broadcast_bytes(b"", group=self._commands).partition(b"\n")
        fields = json.loads(header)
        stream = io.BytesIO(content)
        return {**fields, "payloads": [stream.read(size) for size in fields["sizes"]]}

    def _broadcast_bytes(self, content: bytes, *, source: int = 0, group: Any = None) -> bytes:
        """Return rank `source`'s content on every rank; other ranks' content is unused."""
        size = torch.tensor([len(content)])
        with _rank_errors():
            dist.broadcast(size, source, group=group)
            received = torch.empty(int(size), dtype=torch.uint8)
            if self.rank == source:
                received = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            dist.broadcast(received, source, group=group)
        return received.numpy().tobytes()

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite these CPU tensors on all other ranks with the tensors of rank 0."""
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
    try:
        yield
    except RuntimeError as error:
        # The first sentence, without the position in the source code of torch.
        reason = str(error).splitlines()[0].rpartition("] ")[2].partition(". ")[0]
        raise RankError(
            f"another rank of this trainer is gone ({reason}); the same command resumes the run"
        ) from None


# Sharded tensors (DTensor). Every rank must call each of these functions; the functions return an
# unsharded tensor unchanged.


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor on every rank."""
    return cast(Any, tensor).full_tensor() if is_sharded(tensor) else tensor


def gather_tensor(tensor: Tensor, *, rank: int) -> Tensor:
    """The full tensor on the CPU of rank 0; other ranks get an empty one. `rank` is this rank."""
    if not is_sharded(tensor):
        return tensor
    is_short = tensor.dtype == torch.int16  # which NCCL cannot send
    full = full_tensor(tensor.int() if is_short else tensor).to(tensor.dtype)
    return full.cpu() if rank == 0 else full.new_empty(0)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor without gradient, in the same memory."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def shard_tensor(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a full tensor, as `like` is sharded, on its device."""
    tensor = tensor.to(like.device)
    if not is_sharded(like) or tensor.shape != like.shape:  # another shape: the optimizer's step
        return tensor
    from torch.distributed.tensor import distribute_tensor

    layout: Any = like
    return distribute_tensor(tensor, layout.device_mesh, layout.placements, src_data_rank=None)


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")
