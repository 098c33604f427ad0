"""Ranks over torch.distributed: gloo on CPUs, NCCL and sharded parameters on CUDA.

Knows process groups, tensors and bytes; knows nothing of groups, losses or files. What ranks tell
each other is JSON and raw bytes, never pickle.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from peralta_zmq.errors import RankError
from peralta_zmq.learning.ranks import Module

ORDER_PATIENCE = timedelta(days=365)  # a rank waits for its next order as long as rank 0 lives
SEVERAL = {"cuda": "cpu:gloo,cuda:nccl"}  # the rest is gloo alone


class Order(NamedTuple):
    """What rank 0 wants of the others: words, and contents that they speak about."""

    words: dict[str, Any]
    contents: list[bytes]


def join(device: torch.device) -> ManyRanks:
    """Meet the processes that torchrun has started, as its environment says.

    Raises RankError when they do not come.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with _with_the_others():
        dist.init_process_group(SEVERAL.get(device.type, "gloo"))
    return ManyRanks(device, shards=device.type == "cuda")


class ManyRanks:
    """This process among those of the default process group, which must be there already.

    With `shards` each rank holds a part of every parameter (FSDP2); else each holds all.
    Every method raises RankError when another rank is gone.
    """

    def __init__(self, device: torch.device, *, shards: bool) -> None:
        self.number, self.count = dist.get_rank(), dist.get_world_size()
        self.lined_up = shards
        self._device = device
        orders = dist.new_group(backend="gloo", timeout=ORDER_PATIENCE)
        self._orders = cast(dist.ProcessGroup, orders)

    # What a step adds up.

    def add_up(self, tensor: Tensor) -> None:
        """Put the sum over all ranks into `tensor`."""
        with _with_the_others():
            dist.all_reduce(tensor)

    def merged(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The sum over all ranks of each named number; ranks may know different names."""
        total: dict[str, float] = {}
        for told in self._exchanged(json.dumps(sums).encode()):
            for name, value in cast("dict[str, float]", json.loads(told)).items():
                total[name] = total.get(name, 0.0) + value
        return total

    def add_up_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Make the gradient of each parameter the sum over all ranks.

        A rank without work has no gradients and adds zero. Sharded parameters have their sums
        from the backward pass.
        """
        if self.lined_up:
            return
        counts = torch.tensor([float(each.grad is not None) for each in parameters])
        self.add_up(counts)
        touched = [each for each, count in zip(parameters, counts, strict=True) if count]
        for each in touched:
            if each.grad is None:
                each.grad = torch.zeros_like(each)
        with _with_the_others():
            under_way = [dist.all_reduce(each.grad, async_op=True) for each in touched]
            for each in under_way:
                cast(Any, each).wait()

    # Parameters: whole, or each rank a part.

    def prepared(self, model: Module) -> Module:
        """What to train in the place of `model`: rank 0's weights, whole or a sharded copy."""
        with _with_the_others():
            for each in model.state_dict().values():
                dist.broadcast(each, 0)
        return self._sharded(copy.deepcopy(model)) if self.lined_up else model

    def _sharded(self, model: Module) -> Module:
        mesh = init_device_mesh(self._device.type, (self.count,))
        layers = {str(name) for name in getattr(model, "_no_split_modules", None) or ()}
        parts = [each for each in model.modules() if each.__class__.__name__ in layers]
        for part in (*parts, model):
            sharded = fully_shard(part, mesh=mesh, reshard_after_forward=True)
            sharded.set_gradient_divide_factor(1.0)  # the loss divides by the whole step's totals
            sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other
        return model

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole of a tensor of which each rank may hold a part."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def collected(self, tensor: Tensor) -> Tensor:
        """The whole of it for rank 0, on the CPU if it was in parts; the others get nothing."""
        if not isinstance(tensor, DTensor):
            return tensor
        found = tensor.full_tensor()
        return found.cpu() if self.number == 0 else found.new_empty(0)

    def own_part(self, tensor: Tensor, like: Tensor) -> Tensor:
        """Of a whole tensor what this rank holds, laid out like `like`."""
        tensor = tensor.to(like.device)
        if not isinstance(like, DTensor) or tensor.shape != like.shape:
            return tensor
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)

    # Orders of rank 0.

    def tell(self, words: Mapping[str, Any], contents: Sequence[bytes] = ()) -> None:
        """By rank 0: give the others an order, which each of them hears with `listen`."""
        head = json.dumps({**words, "sizes": [len(each) for each in contents]}).encode()
        whole = b"".join([head, *contents])
        with _with_the_others():
            dist.broadcast(torch.tensor([len(head), len(whole)]), 0, group=self._orders)
            dist.broadcast(_tensor_of(whole), 0, group=self._orders)

    def listen(self) -> Order:
        """By the others: wait for the next order."""
        sizes = torch.zeros(2, dtype=torch.int64)
        with _with_the_others():
            dist.broadcast(sizes, 0, group=self._orders)
            whole = torch.empty(int(sizes[1]), dtype=torch.uint8)
            dist.broadcast(whole, 0, group=self._orders)
        said, start = whole.numpy().tobytes(), int(sizes[0])
        words = json.loads(said[:start])
        contents = list[bytes]()
        for size in words.pop("sizes"):
            contents.append(said[start : start + size])
            start += size
        return Order(words, contents)

    def hand_out(self, tensors: Iterable[Tensor]) -> None:
        """Fill these CPU tensors with those of rank 0, one after another."""
        with _with_the_others():
            for each in tensors:
                dist.broadcast(each.reshape(-1).view(torch.uint8), 0)

    def leave(self) -> None:
        """Part from the others, when all have nothing more to say."""
        dist.destroy_process_group()

    def _exchanged(self, content: bytes) -> list[bytes]:
        """What each rank says, in the order of their numbers."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        with _with_the_others():
            dist.all_gather(sizes, torch.tensor([len(content)]))
            longest = int(max(sizes))
            said = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.count)]
            dist.all_gather(said, _tensor_of(content.ljust(longest)))
        return [each[: int(size)].numpy().tobytes() for each, size in zip(said, sizes, strict=True)]


@contextmanager
def _with_the_others() -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rpartition("] ")[2].partition(". ")[0]
        raise RankError(
            f"another rank of this trainer is gone ({reason}); the same command resumes the run"
        ) from None


def _tensor_of(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
