"""Whether somebody asked us to stop. Knows signals and the clock."""

from __future__ import annotations

import signal
import time
from types import FrameType


class StopSignal:
    """`asked` turns true with the first signal; the second one ends the process at once."""

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        """From now on SIGINT and SIGTERM ask us to stop."""
        signal.signal(signal.SIGINT, self._ask)
        signal.signal(signal.SIGTERM, self._ask)

    def pause(self, seconds: float) -> None:
        """Sleep; not longer than until somebody asks us to stop."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and not self.asked:
            time.sleep(0.1)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        self.asked = True
