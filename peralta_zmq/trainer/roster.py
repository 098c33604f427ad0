"""Who works for the trainer: starts of generators that were heard lately, and what they report.

Knows counters and the clock; knows nothing of groups.
"""

from __future__ import annotations

import time

from peralta_zmq import wire
from peralta_zmq.observe.books import Books

SILENCE_SECONDS = 30.0  # a generator unheard for so long is gone
SAME_NAME_SECONDS = 2.0  # a restarted generator needs longer to come back
MAX_LIVE = 4096  # generators spoken to
FARES = ("tokens_per_s", "blocked_frac", "reload_s", "step", "unjudged")


class Roster:
    """`reports` are the latest by sender; `wants_keyframe` says that one of them cannot follow."""

    def __init__(self, counters: wire.CounterReceiver, books: Books) -> None:
        self.reports: dict[str, wire.Counters] = {}
        self.wants_keyframe = False
        self._counters, self._books = counters, books
        self._heard: dict[str, float] = {}  # sender -> when it was heard last

    def hear(self, *, step: int) -> None:
        """Take in what generators report of themselves: who reports is alive."""
        before, self.reports = self.reports, dict(self._counters.receive())
        for sender, report in self.reports.items():
            earlier = before.get(sender)
            if earlier is not report:
                self.meet(sender, step=step, hello=report.hello)
                # Once for each time of want: one that cannot read the keyframe either waits on.
                asks = report.wants_keyframe and not (earlier and earlier.wants_keyframe)
                self.wants_keyframe = self.wants_keyframe or asks

    def meet(self, sender: str, *, step: int, **facts: object) -> None:
        """We have heard of a start of a generator just now, perhaps for the first time."""
        if sender not in self._heard:
            name, _, boot = sender.rpartition("/")
            self._books.event("join", generator=name, boot=boot, step=step, **facts)
            twins = [each for each in self.live(within=SAME_NAME_SECONDS)
                     if each.startswith(f"{name}/")]  # fmt: skip
            if twins:
                self._books.note(
                    f"two generators are called {name}; if both run, give one --generator.name"
                )
        self._heard[sender] = time.monotonic()

    def excuse(self, seconds: float) -> None:
        """We heard nobody while we computed for so long: that is no silence of theirs."""
        self._heard = {sender: at + seconds for sender, at in self._heard.items()}

    def live(self, *, within: float = SILENCE_SECONDS) -> list[str]:
        """Senders heard in the last so many seconds."""
        now = time.monotonic()
        self._heard = {
            sender: at for sender, at in self._heard.items() if now - at < SILENCE_SECONDS
        }
        return [sender for sender, at in self._heard.items() if now - at < within][:MAX_LIVE]

    def fares(self) -> dict[str, float]:
        """How each generator that is alive fares, as it reported last: gen/NAME/FIGURE."""
        return {
            f"gen/{report.generator_id}/{name}": getattr(report, name)
            for sender in self.live() if (report := self.reports.get(sender))
            for name in FARES
        }  # fmt: skip

    def told_beyond(self, seen: dict[str, int]) -> int:
        """Groups that were made, as their generators report, beyond the highest that came."""
        return sum(
            max(0, report.made - seen.get(sender, -1) - 1)
            for sender, report in self.reports.items()
        )
