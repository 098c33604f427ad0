"""Following a store beside the sampling: look, fetch, verify, and offer what is ready.

Knows a store and a folder for the local copy; knows nothing of engines. One thread does all input
and output, because a dead mount blocks whoever touches it; the loop only asks `ready()`.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from peralta_zmq.errors import ChainError, StoreError
from peralta_zmq.failpoints import failpoint
from peralta_zmq.weights import tensors as sets
from peralta_zmq.weights.link_speed import LinkSpeedCheck
from peralta_zmq.weights.replica import LocalReplica
from peralta_zmq.weights.store import WeightStore
from peralta_zmq.weights.version import Version
from peralta_zmq.weights.watch import Watch

FIRST_POLL_SECONDS = 0.2  # while we have nothing to serve
OFFLINE_SECONDS = 5.0  # without a store before the copy of an earlier process is served
JITTER = 0.2  # of the time between two looks, so that generators do not look all at once
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingWeights:
    """A version that lies here whole and verified."""

    version: Version
    tensors: Mapping[str, torch.Tensor]  # views of the copy: valid until settled
    folder: Path  # with everything that `from_pretrained` needs
    bytes_read: int
    visible_seconds: float  # from the first sign of it until it was ready


class WeightSubscriber:
    """Owns the thread and the local copy. Use with `closing`.

    `folder` keeps the copy over restarts; a folder that another process uses is left alone.
    `watch` is the folder whose events are hints; None for none.
    """

    def __init__(
        self,
        store: WeightStore,
        folder: Path,
        *,
        poll_seconds: float,
        watch: Path | None = None,
    ) -> None:
        self.wants_keyframe = False  # the newest version cannot be reached from any that we have
        self._store, self._poll_seconds = store, poll_seconds
        self._watched = watch
        self._watch: Watch | None = None
        self._temporary: Path | None = None
        self._lock: IO[bytes] | None = None
        self._copy = LocalReplica(self._own(folder))
        self._served: Version | None = None
        self._staged: PendingWeights | None = None
        self._taken: PendingWeights | None = None
        self._hinted = -1, ""  # number and id of the version announced last
        self._noticed: tuple[int, float] = (-1, 0.0)  # number, monotonic seconds
        self._fetched = 0.0  # when the version that is being staged was here, monotonic seconds
        self._judge = LinkSpeedCheck()
        self._said = ""
        self._failure: BaseException | None = None
        self._wake, self._closing = threading.Event(), False
        self._changed = threading.Condition()
        self._random = random.Random(os.getpid())
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self._thread.start()

    def hint(self, number: int, weights_id: str = "") -> None:
        """A version was announced; look for it now, whatever the listing says."""
        if number >= 0 and (number, weights_id) != self._hinted:
            self._hinted = number, weights_id
            self._wake.set()

    def ready(self, *, timeout: float = 0.0) -> PendingWeights | None:
        """The newest version that can be applied, after waiting up to `timeout` seconds for one.

        It is the caller's until `settle`. Raises what the thread died of, if it did.
        """
        with self._changed:
            if timeout:
                self._changed.wait_for(lambda: self._staged or self._failure, timeout)
            if self._failure:
                raise self._failure
            self._taken, self._staged = self._staged or self._taken, None
            return self._taken

    def settle(self, *, refused: str = "") -> None:
        """The version last taken is applied, or refused for a reason."""
        with self._changed:
            taken, self._taken = self._taken, None
            assert taken is not None
            if refused:
                self._store.quarantine(taken.version)
            else:
                self._served = taken.version
            self._changed.notify_all()
        self._wake.set()  # something newer may wait for its turn

    def give_back(self) -> None:
        """The version that is served does not compute: refuse it, and offer the newest other."""
        with self._changed:
            assert self._served is not None
            self._store.quarantine(self._served)
            self._served = None
        self._wake.set()

    def close(self) -> None:
        """Stop; a thread that hangs in a dead mount is left behind."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._wake.set()
        self._thread.join(timeout=2.0)
        if self._watch:
            self._watch.close()
        if self._lock:
            self._lock.close()
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _own(self, folder: Path) -> Path:
        """`folder`, locked, or a temporary one when it cannot be ours."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / "lock").open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if self._lock:
                self._lock.close()
                self._lock = None
            self._temporary = Path(tempfile.mkdtemp(prefix="peralta-"))
            logger.info("copy in %s: %s is not ours (%s)", self._temporary, folder, error.strerror)
            return self._temporary
        return folder

    # The thread.

    def _run(self) -> None:
        try:
            self._copy.recover()
            started = time.monotonic()
            while not self._closing:
                self._wake.clear()
                self._arm()
                self._look()
                if self._served is None and time.monotonic() - started > OFFLINE_SECONDS:
                    self._serve_offline()
                self._wake.wait(self._patience())
        except BaseException as error:  # noqa: BLE001  (the loop raises it)
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _patience(self) -> float:
        idle = self._served is None and self._staged is None and self._taken is None
        seconds = min(FIRST_POLL_SECONDS, self._poll_seconds) if idle else self._poll_seconds
        return min(threading.TIMEOUT_MAX, seconds * self._random.uniform(1 - JITTER, 1 + JITTER))

    def _arm(self) -> None:
        """Watch the folder once it is there; it may go at any moment, and another come."""
        if self._watched is None or (self._watch is not None and self._watch.sees(self._watched)):
            return
        with contextlib.suppress(OSError):
            before, self._watch = self._watch, None
            if before:
                before.close()
            self._watch = Watch(
                self._watched, self._wake.set, poll_seconds=min(60.0, self._poll_seconds)
            )

    def _look(self) -> None:
        while not self._closing:
            target = self._announced() or self._store.newest()
            if target is None:
                self.wants_keyframe = False  # the store is away; perhaps it lied before
                return
            if not self._is_news(target):
                return
            if self._noticed[0] != target.number:
                self._noticed = target.number, time.monotonic()
            try:
                self._stage(target)
            except StoreError as error:  # perhaps a passing fault: look again
                self.wants_keyframe = isinstance(error, ChainError)
                self._say(f"unread version={target.number} reason={error}")
                if self._store.look(target.number) is not None:
                    return
                # it is refused from now on: the one before may do

    def _announced(self) -> Version | None:
        """The announced version if it is there: a listing may be old where a name is instant."""
        number, _ = self._hinted
        if number <= max((each.number for each in self._known()), default=-1):
            return None
        version = self._store.look(number)
        return version if version is not None and self._is_news(version) else None

    def _is_news(self, version: Version) -> bool:
        """Newer than what is served or ready; another run's is newer whatever its number."""
        number, weights_id = self._hinted
        if version.number == number and weights_id not in ("", version.weights_id):
            self._say(
                f"unread version={number} reason=its id is {version.weights_id}, not {weights_id}"
            )
            return False
        return all(
            each.run_id != version.run_id or each.number < version.number for each in self._known()
        )

    def _known(self) -> list[Version]:
        """What is served, offered or being applied."""
        with self._changed:
            stages = [each.version for each in (self._staged, self._taken) if each]
            return [*stages, self._served] if self._served else stages

    def _stage(self, target: Version) -> None:
        """Bring the copy to `target`, check it, and offer it."""
        served = self._served  # another thread may give it back
        model = served.says("model") if served else None
        started = time.monotonic()
        count = self._copy.advance(
            self._store, target, model=model, before_change=self._wait_until_settled
        )
        tensors = self._checked(target)
        failpoint("load.checked")
        self._offer(target, tensors, count)
        if count:
            rate = count / max(1e-6, self._fetched - started) / 1e6
            verdict = self._judge.hear(
                target.number, noticed=self._noticed[1], size=target.size, megabytes_per_second=rate
            )
            if verdict:
                logger.warning(verdict)

    def _checked(self, version: Version) -> Mapping[str, torch.Tensor]:
        """What the copy holds of a version, quarantined when some of it is not finite."""
        tensors = self._copy.tensors()
        try:
            sets.check_finite(tensors)
        except ValueError as error:
            self._store.quarantine(version)
            raise StoreError(f"version {version.number}: {error}") from None
        return tensors

    def _wait_until_settled(self) -> None:
        """The copy must not change while the loop reads it; what it has not taken is withdrawn."""
        self._fetched = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._taken is None or self._closing)
            if self._closing:
                raise StoreError("closing")
            self._staged = None

    def _offer(self, version: Version, tensors: Mapping[str, torch.Tensor], count: int) -> None:
        visible = time.monotonic() - self._noticed[1]
        self._copy.shared = self._served is None  # a model may be made over the file itself
        self.wants_keyframe, self._said = False, ""
        with self._changed:
            self._staged = PendingWeights(version, tensors, self._copy.folder, count, visible)
            self._changed.notify_all()

    def _serve_offline(self) -> None:
        """What an earlier process left, when there is no store to ask."""
        version = self._copy.version
        if version is None or self._staged or self._taken or self._store.run_id is not None:
            return
        try:
            tensors = self._checked(version)
        except StoreError as error:
            self._copy.version = None
            self._say(str(error))
            return
        self._say(f"no store at {self._store.where}: serving version={version.number} as it was")
        self._noticed = version.number, time.monotonic()
        self._offer(version, tensors, 0)

    def _say(self, text: str) -> None:
        if text != self._said:  # once, not at every look
            logger.warning(text)
        self._said = text
