"""Peak bytes of the tensors that operations allocate."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Within the block, counts the bytes of live tensors that were allocated in it."""

    def __init__(self) -> None:
        super().__init__()
        self.peak, self._live = 0, dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        known = {each.untyped_storage()._cdata for each in tree_leaves(args) if _is_tensor(each)}
        result = func(*args, **(kwargs or {}))
        self._live = {key: each for key, each in self._live.items() if not each[0].expired()}
        for tensor in filter(_is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in known and storage.device.type != "meta":
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
