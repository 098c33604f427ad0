"""Objects that all parts of a trainer session share: settings, run log, announcement, stop."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from peralta_zmq import wire
from peralta_zmq.config import Config
from peralta_zmq.observe.run_log import RunLog


class StopSignal:
    """Sets `requested` on the first SIGINT or SIGTERM; the second one ends the process."""

    def __init__(self) -> None:
        self.requested = False

    def install(self) -> None:
        """Install the signal handlers of this process."""
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    def pause(self, seconds: float) -> None:
        """Sleep; return early when a stop is requested."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.requested:
            time.sleep(0.1)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        self.requested = True


class StatusPublisher:
    """Publishes the trainer's announcement; each caller updates its own fields. Thread-safe."""

    def __init__(
        self, publisher: wire.AnnouncementPublisher, announcement: wire.Announcement
    ) -> None:
        self.announcement = announcement
        self._publisher, self._lock = publisher, threading.Lock()

    def publish(self, **fields: Any) -> None:
        """Replace these fields and publish the whole announcement."""
        with self._lock:
            self.announcement = replace(self.announcement, **fields)
            self._publisher.publish(self.announcement)


@dataclass(frozen=True, slots=True)
class Session:
    """One start of the trainer, from the opened run folder to the end of the process."""

    config: Config
    run_id: str
    run_log: RunLog
    status: StatusPublisher
    stop: StopSignal

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.config.run_folder
