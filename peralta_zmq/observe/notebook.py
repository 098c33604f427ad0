"""Display in the output of a notebook's cell, in the place of rich.live.Live.

rich itself redraws in a notebook only with ipywidgets, which not every front end shows.
"""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console, RenderableType


def in_notebook() -> bool:
    return "ipykernel" in sys.modules


class CellDisplay:
    """Text in the output of the current cell, replaced by each `update`."""

    def __init__(self) -> None:
        self.console = Console(width=100, force_jupyter=False)
        self._handle: Any = None  # IPython's, to replace the text

    def refresh(self) -> None:
        """Do nothing: `update` has drawn."""

    def update(self, content: RenderableType, refresh: bool = False) -> None:
        from IPython.display import display  # pyright: ignore[reportUnknownVariableType]

        with self.console.capture() as captured:
            self.console.print(content)
        bundle = {"text/plain": captured.get()}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)
