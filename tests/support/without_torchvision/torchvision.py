"""With this folder in PYTHONPATH, modules that import torchvision can be imported.

vLLM's module for Qwen3.5 imports it, and there is no wheel for the CPU build of torch.
"""

import sys
from types import ModuleType
from typing import Any

__version__ = "0.28.0"
__path__: list[str] = []


class Stub(ModuleType):
    """A module, or a class in one, with every attribute."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(name)


MODULES = "io transforms transforms.functional transforms.v2 transforms.v2.functional"
for name in MODULES.split():
    sys.modules[f"torchvision.{name}"] = Stub(name)
