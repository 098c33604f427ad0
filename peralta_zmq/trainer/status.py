"""What the trainer says of itself: each part of it changes its own fields of one announcement."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from peralta_zmq import wire


class StatusPublisher:
    """Says the whole announcement again whenever a field of it changes; any thread may call."""

    def __init__(self, announcer: wire.AnnouncementPublisher, first: wire.Announcement) -> None:
        self.said = first
        self._announcer, self._speaking = announcer, threading.Lock()

    def say(self, **changed: Any) -> None:
        """Announce these fields, and the others as they were."""
        with self._speaking:
            self.said = replace(self.said, **changed)
            self._announcer.publish(self.said)
