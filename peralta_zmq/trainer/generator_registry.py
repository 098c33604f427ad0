"""Who works for the trainer: starts of generators that were heard lately, and what they report.

Knows counters and the clock; knows nothing of groups.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from peralta_zmq import wire
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.observe.terminal import worker_info_text

SILENCE_SECONDS = 30.0  # a generator unheard for so long is gone
SAME_NAME_SECONDS = 2.0  # a restarted generator needs longer to come back
LAST_SECONDS = 2.0  # for their last reports
MAX_LIVE = 4096  # generators spoken to
MAX_STARTS = 64  # of one name; of a name that starts again and again the newest
MAX_LAST = 1 << 16  # last reports kept
FARES = ("tokens_per_s", "blocked_frac", "queue_frac", "reload_s", "step", "unjudged")


class GeneratorRegistry:
    """`reports` are the latest by sender; `wants_keyframe` says that one of them cannot follow."""

    def __init__(
        self, counters: wire.GeneratorStatusReceiver, books: RunLog, hello: Mapping[str, str]
    ) -> None:
        self.reports: dict[str, wire.GeneratorStatus] = {}
        self.wants_keyframe = False
        self._counters, self._books, self._hello = counters, books, hello
        self._heard: dict[str, float] = {}  # sender -> when it was heard last
        self._listened = time.monotonic()  # when we did last: who computes hears nobody
        self._greeted: set[str] = set()  # of those, who has said hello
        self._last = dict(books.last_reports)  # sender that makes no more -> groups it has made

    def hear(self, *, step: int, timeout: float = 0.0) -> None:
        """Take in what generators report of themselves: who reports is alive.

        Waits for so many seconds at most until there is a report.
        """
        came = self._counters.receive(timeout=timeout)
        if came:
            self._take_in(came, step=step)
        if self._counters.is_empty:
            self._listened = time.monotonic()

    def _take_in(self, came: Mapping[str, wire.GeneratorStatus], *, step: int) -> None:
        before, self.reports = self.reports, dict(self._counters.latest)
        for sender, report in came.items():
            earlier = before.get(sender)
            self.meet(sender, step=step, hello=report.worker_info)
            # Once for each time of want: one that cannot read the keyframe either waits on.
            asks = report.wants_keyframe and not (earlier and earlier.wants_keyframe)
            self.wants_keyframe = self.wants_keyframe or asks
            if report.last:
                self._note_last(sender, report.made)

    def hear_last(self, *, step: int) -> None:
        """Wait a moment for the last report of each, which they send when they hear the end."""
        deadline = time.monotonic() + LAST_SECONDS
        self.live()  # who was gone before is not waited for; who ends now does not leave
        self.hear(step=step)
        while self._heard.keys() - self._last.keys():
            left = deadline - time.monotonic()
            if left <= 0.0:
                return
            self.hear(step=step, timeout=left)

    def last_reports(self) -> dict[str, int]:
        """Senders that have said that they make no more, also to an earlier session, and how many
        groups each has made.
        """
        return dict(self._last)

    def meet(self, sender: str, *, step: int, hello: Mapping[str, str] | None = None) -> None:
        """We have heard of a start of a generator just now, perhaps for the first time.

        Its hello is in the event of its join, or in one of its own when a group came sooner.
        """
        name, _, incarnation = sender.rpartition("/")
        facts = {"generator": name, "incarnation": incarnation, "step": step}
        is_new = sender not in self._heard
        if is_new:
            starts = [each for each in self._heard if each.rpartition("/")[0] == name]
            if len(starts) >= MAX_STARTS:
                self._leave(min(starts, key=self._heard.__getitem__))
            if len(self._heard) >= MAX_LIVE:
                return
            self._greeted &= self._heard.keys()
            self._books.event("join", **facts, hello=dict(hello or {}))
            self._say_twins(name)
        if hello and sender not in self._greeted:
            self._greeted.add(sender)
            self._books.note(worker_info_text(name, hello, trainer=self._hello))
            if not is_new:
                self._books.event("hello", **facts, hello=dict(hello))
        self._heard[sender] = time.monotonic()

    def _say_twins(self, name: str) -> None:
        if any(each.startswith(f"{name}/") for each in self.live(within=SAME_NAME_SECONDS)):
            self._books.note(
                f"two generators are called {name}; if both run, give one --generator.name"
            )

    def _note_last(self, sender: str, made: int) -> None:
        """It is said once: an event tells it to the sessions after this one."""
        if sender in self._heard and sender not in self._last and len(self._last) < MAX_LAST:
            self._last[sender] = made
            name, _, incarnation = sender.rpartition("/")
            self._books.event("last_report", generator=name, incarnation=incarnation, made=made)

    def live(self, *, within: float = SILENCE_SECONDS) -> list[str]:
        """Senders heard in the last so many seconds before we listened last."""
        now = self._listened
        for sender in [each for each, at in self._heard.items() if now - at >= SILENCE_SECONDS]:
            self._leave(sender)
        return [sender for sender, at in self._heard.items() if now - at < within]

    def _leave(self, sender: str) -> None:
        del self._heard[sender]
        name, _, incarnation = sender.rpartition("/")
        self._books.event("leave", generator=name, incarnation=incarnation)

    def fares(self, known: Mapping[str, float]) -> dict[str, float]:
        """How each generator that is alive fares, as it reported last: gen/NAME/FIGURE.

        Its groups, in the row `known`, may be from newer weights than its last report.
        """
        told = {
            f"gen/{report.generator_id}/{name}": getattr(report, name)
            for sender in self.live() if (report := self.reports.get(sender))
            for name in FARES
        }  # fmt: skip
        newer = {key: known[key] for key in told if key.endswith("/step") and key in known}
        return told | {key: max(step, told[key]) for key, step in newer.items()}

    def told_beyond(self, seen: dict[str, int]) -> int:
        """Groups that were made, as their generators report, beyond the highest that came."""
        made = self._last | {sender: report.made for sender, report in self.reports.items()}
        return sum(max(0, count - seen.get(sender, -1) - 1) for sender, count in made.items())
