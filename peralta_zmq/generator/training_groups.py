"""Training groups: which problem a generator samples next, and when.

A sample is one draw of a problem, which its index in the run's shuffled order determines. A
generator draws the sample ranges that the trainer grants to it; without one for long, its static
share: every n-th index, if the trainer announces n live generators.
"""

from __future__ import annotations

import logging
import math
import time
import zlib
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import count as count_from

from peralta_zmq import build, wire
from peralta_zmq.config import Config
from peralta_zmq.engines import RequestGroup, Sampler
from peralta_zmq.engines.sessions import Sessions
from peralta_zmq.environments.curriculum import ProblemSampler, is_in_bitmap
from peralta_zmq.environments.dataset import Environments, problem_id
from peralta_zmq.errors import ConfigError
from peralta_zmq.generator.scoring import SampledGroup, ScoringQueue
from peralta_zmq.generator.trainer_link import SILENCE_SECONDS, TrainerLink
from peralta_zmq.generator.weight_sync import ServedWeights
from peralta_zmq.rollout import Problem

logger = logging.getLogger(__name__)


def sampling_seed(run_seed: int, sender: str, purpose: str) -> int:
    """A seed that differs for each run, purpose and start of a generator (sender)."""
    return zlib.crc32(f"{run_seed}/{sender}/{purpose}".encode())


class TrainingGroups:
    """Starts groups for training, as far as the trainer, the outbox and the rewards have room."""

    def __init__(
        self,
        config: Config,
        environments: Environments,
        weights: ServedWeights,
        link: TrainerLink,
        rewards: ScoringQueue,
        sessions: Sessions,
    ) -> None:
        self._sessions = sessions
        self._config = config
        self._environments = environments
        self._weights = weights
        self._link = link
        self._rewards = rewards
        self._pacer = SamplingPacer(
            config.groups_per_step,
            config.train.max_async_level,
            name=link.name,
            steps_per_version=config.weights.interval,
            follow_step_size=len({*config.group_sizes.values()}) > 1
            or any(env.has_agent for env in config.environments),
            silence_seconds=link.silence_seconds,
        )
        self.groups: list[RequestGroup] = []  # in flight, or interrupted
        self.is_paused = False  # start no further group, because an evaluation is due
        self._failed: list[RequestGroup] = []  # in flight at the last failure of the engine
        self.start_run()

    def start_run(self) -> None:
        config = self._config
        link = self._link
        self._source = ProblemSource(config, self._environments, link)
        seed = sampling_seed(config.run.seed, link.outbox.sender, "training")
        self._sampling_of = build.group_sampling(config, seed=seed)
        # The environment of the sessions that clients open.
        self._agent_env = next((env for env in config.environments if env.has_agent), None)
        self._client_sampling = build.make_sampling(config, self._agent_env, seed=seed)

    def submit_due(self, sampler: Sampler) -> None:
        """Resume interrupted groups, and start as many others as may be started now."""
        if self.is_paused:
            return
        if any(group.is_interrupted for group in self.groups):
            self._drop_stale(sampler)
            sampler.resume(self.groups)
        while self._may_start(sampler) and (problem := self._source.draw()) is not None:
            group = sampler.start(problem, *self._sampling_of(problem), replies=self._environments)
            self.groups.append(group)
            self._pacer.record_start()
        self._start_of_clients(sampler)

    def _start_of_clients(self, sampler: Sampler) -> None:
        """Start the groups whose sessions clients open, and let them open further ones or not."""
        if (env := self._agent_env) is None:
            return
        for begun in self._sessions.take_groups():
            problem = Problem(problem_id([env.label, begun.name]), env.label, (), "")
            group = sampler.start_agents(problem, begun.runs, num_runs=begun.size)
            self.groups.append(group)
            self._pacer.record_start()
        is_open = self._may_start(sampler)
        self._sessions.sampling = self._client_sampling if is_open else None

    def take(self, ended: Collection[RequestGroup]) -> list[SampledGroup]:
        """Remove the training groups among those that have ended; begin to score them."""
        own = [group for group in ended if group in self.groups]
        self.groups = [group for group in self.groups if group not in own]
        return [
            SampledGroup(
                group.problem,
                group.completions,
                self._environments.score(group.problem, group.completions),
                None,
            )
            for group in own
        ]

    def drop(self, sampler: Sampler) -> int:
        """Drop all groups in flight; returns their number."""
        return self._drop(self.groups, sampler)

    def drop_failed(self, sampler: Sampler) -> int:
        """Drop the groups that an earlier failure interrupted, too: they may be the cause."""
        num_dropped = self._drop([each for each in self.groups if each in self._failed], sampler)
        self._failed = list(self.groups)
        return num_dropped

    def _may_start(self, sampler: Sampler) -> bool:
        outbox = self._link.outbox
        num_unsent = len(self.groups) + len(self._rewards)
        return (
            sampler.has_room
            and not self._weights.is_draining
            and outbox.has_room(num_unsent)
            and self._environments.has_room
            and self._pacer.may_start(
                self._link.announcement,
                step=self._weights.version.step,
                num_pending=outbox.num_pending + num_unsent,  # not trained or dropped yet
                num_unreceived=outbox.num_unreceived + num_unsent,  # not received yet
            )
        )

    def _drop_stale(self, sampler: Sampler) -> None:
        announcement = self._link.announcement or wire.Announcement("")
        newest_step = max(announcement.started_step, self._weights.version.step)
        oldest_step = newest_step - self._config.train.staleness_limit
        stale = [group for group in self.groups if group.has_older_token(oldest_step)]
        if num_dropped := self._drop(stale, sampler):
            self._link.num_aborted += num_dropped
            logger.info("dropped interrupted groups: count=%d reason=stale", num_dropped)

    def _drop(self, groups: list[RequestGroup], sampler: Sampler) -> int:
        sampler.drop(groups)
        self.groups = [group for group in self.groups if group not in groups]
        return len(groups)


class ProblemSource:
    """This generator's endless sequence of training problems.

    After `range_timeout` seconds in which the trainer waited and granted no range, the sequence is
    the static share.
    """

    def __init__(
        self,
        config: Config,
        environments: Environments,
        link: TrainerLink,
        *,
        range_timeout: float = 30.0,
    ) -> None:
        sizes = list(environments.sizes.values())
        self._sampler = ProblemSampler(
            sizes, seed=config.run.seed, ratios=config.curriculum.env_ratios
        )
        self._problems = environments.problems
        self._digest = environments.digest
        self._name = config.generator.full_name
        self._link = link
        self._range_timeout = range_timeout
        self._share: Iterator[int] | None = None
        self._waited = 0.0  # seconds in which the trainer waited, by announcements up to `_last`
        self._last = link.announcement
        self._last_at = time.monotonic()

    def draw(self) -> Problem | None:
        """The next problem that the trainer does not exclude; None while there is none.

        Raises ConfigError if the trainer has other problems.
        """
        newest = self._link.announcement
        if newest is not None and newest.train_set_digest not in (b"", self._digest):
            raise ConfigError(
                f"generator {self._name} has other training problems than the trainer; use its "
                "[data], [[env]], model, engine.max_model_len and sampling.max_completion_length"
            )
        for _ in range(1000):  # samples; the caller serves its sockets between two calls
            if (sample_index := self._next_index(newest)) is None:
                return None
            position = self._sampler.position(sample_index)
            if newest is None or not is_in_bitmap(newest.excluded, position):
                return replace(self._problems[position], sample_index=sample_index)
        return None

    def _next_index(self, newest: wire.Announcement | None) -> int | None:
        """The next granted sample index, or that of the static share; None while there is none."""
        ranges = self._link.ranges
        if (sample_index := ranges.draw()) is not None:
            self._share = None
            self._waited = 0.0
            return sample_index
        now = time.monotonic()
        if newest is not self._last:
            if newest is not None and newest.waiting:
                # After a longer gap, the trainer may have been away.
                self._waited += min(now - self._last_at, 5.0)
            self._last = newest
            self._last_at = now
        if newest is None or self._waited <= self._range_timeout:
            return None
        if self._share is None:
            index, count = own_share(newest, self._link.outbox.sender)
            start = newest.next_sample_index
            self._share = count_from(start + (index - start) % count, count)
            logger.warning(
                "no sample range from the trainer; sampling one problem in %d, so that several "
                "generators may sample the same ones",
                count,
            )
        sample_index = next(self._share)
        ranges.record_drawn(sample_index)
        return sample_index


def own_share(announcement: wire.Announcement | None, sender: str) -> tuple[int, int]:
    """Index of a generator among the live ones that the trainer announces, and their number."""
    live = announcement.senders if announcement else {}
    senders = sorted({*live, sender})
    return senders.index(sender), len(senders)


class SamplingPacer:
    """Keeps the expected staleness of a generator's groups within `max_async_level`, in versions.

    A group is pending from its start until its training step begins or the trainer drops it. From
    its pending groups a generator computes in which step its next group will be trained, if each of
    n suppliers (generators with groups in the newest steps) supplies one n-th of a step. A
    generator that is no supplier counts the live ones instead, so that invented senders do not slow
    a supplier down.

    A crashed generator or a lost announcement must not block the others: at the limit it starts a
    group after `silence_seconds`, and after `starved_seconds` if the trainer waits for groups and
    has received all of this generator. With `follow_step_size` the number of groups in the newest
    step replaces `groups_per_step`.
    """

    def __init__(
        self,
        groups_per_step: int,
        max_async_level: int,
        *,
        name: str,  # this generator
        steps_per_version: int = 1,
        follow_step_size: bool = False,
        silence_seconds: float = SILENCE_SECONDS,
        starved_seconds: float = 0.25,
    ) -> None:
        self._starved_seconds = starved_seconds
        self._groups_per_step = groups_per_step
        self._follow_step_size = follow_step_size
        self._name = name
        self._max_async_level = max_async_level
        self._steps_per_version = steps_per_version
        self._silence_seconds = silence_seconds
        self._last_start = time.monotonic()

    def may_start(
        self,
        announcement: wire.Announcement | None,
        *,
        step: int,
        num_pending: int,
        num_unreceived: int,
    ) -> bool:
        """Whether a group sampled from the weights of policy step `step` may be started.

        `num_unreceived` of the generator's `num_pending` groups have not reached the trainer.
        """
        announcement = announcement or wire.Announcement("")  # default values: nothing has started
        starved = announcement.waiting and not num_unreceived
        limit = self._starved_seconds if starved else self._silence_seconds
        if time.monotonic() - self._last_start > limit:
            return True
        groups_per_step = self._groups_per_step
        if self._follow_step_size and announcement.groups_in_step:
            groups_per_step = announcement.groups_in_step
        names = announcement.suppliers.keys()
        if self._name not in names:
            # A sender is NAME/INCARNATION; a generator that has restarted has several.
            names = {sender.split("/")[0] for sender in announcement.senders}
        share = math.ceil(groups_per_step / max(1, len(names)))
        started_step = max(announcement.started_step, step)  # the announcement may be old
        # The steps taken before the group is trained: pending groups are consumed first.
        num_taken = started_step + num_pending // share
        staleness = num_taken // self._steps_per_version - step // self._steps_per_version
        return staleness <= self._max_async_level

    def record_start(self) -> None:
        self._last_start = time.monotonic()
