"""The generator's loop: newest weights, problems, completions, rewards, groups to the trainer.

Knows the config and every leaf; knows nothing of the trainer's loop. It keeps no state that a
restart needs: the weights tell it how far the run is.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace

from peralta_zmq import build, models, registry, wire
from peralta_zmq.build import open_environments
from peralta_zmq.config import Config
from peralta_zmq.engines import ask
from peralta_zmq.environments.curriculum import ProblemSampler, assigned_samples, is_excluded
from peralta_zmq.environments.dataset import Environments, check_tokens
from peralta_zmq.environments.held_out import examples_for
from peralta_zmq.errors import EngineError, RewardError, TaskError, WireError
from peralta_zmq.failpoints import failpoint
from peralta_zmq.generator.pacing import SILENT_SECONDS, SamplingPacer
from peralta_zmq.generator.weight_sync import open_engine, open_follower, refresh
from peralta_zmq.rollout import Completion, Problem, RolloutGroup, Sampling, rollout_of, sender_of
from peralta_zmq.weights.subscriber import WeightSubscriber
from peralta_zmq.weights.version import Version

WAITING_SECONDS = 5.0  # between two lines that say what we wait for
IDLE_SECONDS = 0.002  # without work, between two looks for weights and announcements
MAX_FAILURES = 16  # groups in a row that could not be scored, before we stop
logger = logging.getLogger(__name__)


def run(config: Config) -> None:
    """Sample, score and send until the trainer says that the run is complete.

    Raises ConfigError, TaskError; waits, saying so, for weights and for the trainer.
    """
    models.keep_memory()
    threads = models.use_threads(config.generator.num_workers)
    device = models.choose_device(config.model.device)
    hello = models.worker_info(device, models.choose_dtype(device, config.model.dtype)[0])
    name = config.generator.name or f"{socket.gethostname()}-{config.generator.index}"
    address, folder = f"tcp://{config.wire.host}:{config.wire.port}", config.keys_folder
    keys = wire.generator_keys(folder, name) if folder else None
    with closing(open_environments(config, "train")) as environments, ExitStack() as stack:
        listener = wire.AnnouncementSubscriber(wire.next_port(address), keys=keys)
        stack.enter_context(closing(listener))
        follower = stack.enter_context(closing(open_follower(config, name)))
        counters = wire.GeneratorStatusSender(wire.next_port(address, 2), keys=keys)
        stack.enter_context(closing(counters))
        incarnation = os.urandom(8)

        def ask_for_keyframe(run_id: str) -> None:
            if counters.due:
                report = wire.GeneratorStatus(
                    run_id, name, incarnation, wants_keyframe=True, worker_info=hello
                )
                counters.send(report)

        version, engine, tokenizer = open_engine(
            config, follower, listener, address, ask_for_keyframe
        )
        logger.info("generator=%s threads=%d version=%d", name, threads, version.number)
        sender = wire.RolloutSender(address, hwm=config.wire.hwm, keys=keys)
        stack.enter_context(closing(sender))
        line = TrainerConnection(listener, sender, counters)
        worker = Generator(config, name, incarnation, follower, line, version, hello)
        check_tokens(environments.problems, len(tokenizer))
        worker.work(engine, tokenizer, environments)


class StaleRunError(Exception):
    """The weights are of another run, or of another line of its steps: the groups under way are of
    no use.
    """


@dataclass(frozen=True, slots=True)
class TrainerConnection:
    """The three sockets to the trainer."""

    listener: wire.AnnouncementSubscriber
    sender: wire.RolloutSender
    counters: wire.GeneratorStatusSender


class Generator:
    """What stays open while sampling, and the loop itself."""

    def __init__(
        self,
        config: Config,
        name: str,
        incarnation: bytes,
        follower: WeightSubscriber,
        line: TrainerConnection,
        version: Version,
        hello: dict[str, str],
    ) -> None:
        self._config, self._follower, self._line = config, follower, line
        self._name, self._hello = name, hello
        self._begin(version, incarnation)
        self._draining = False  # waiting for the groups under way to apply a newer version
        self._done = False  # the run is complete
        self._unjudged = 0  # groups without a reward
        self._tokens, self._blocked, self._queued = 0, 0.0, 0.0  # since a report
        self._reported = time.monotonic()
        self._silence_said = time.monotonic()
        self._is_left = False  # by a trainer that has nothing more to do
        self._reload_seconds = 0.0  # of the latest change of weights
        self._factor = config.curriculum.oversampling_factor
        per_step = math.ceil(config.groups_per_step * self._factor)
        self._pace = SamplingPacer(per_step, config.train.max_async_level)
        self._failures = 0  # groups in a row that could not be scored

    def _begin(self, version: Version, incarnation: bytes) -> None:
        """Nothing made so far belongs to this run."""
        config, self._boot = self._config, incarnation
        self._version, self._ids = version, dict[int, tuple[str, str]]()  # policy step -> run, wid
        self._serve(version)
        self._sequence = 0  # of the next group
        self._under_way = 0  # groups in the engine
        self._known_taken = 0  # of our groups, as the trainer said last
        self._todo: Iterator[tuple[int, int]] | None = None  # draws and positions, once begun
        self._evaluated = -1  # the newest evaluation that we have done our part of
        factor = config.curriculum.oversampling_factor
        in_time = math.ceil((config.train.max_async_level + 2) * config.groups_per_step * factor)
        self._outbox = wire.Outbox(sender_of(self._name, incarnation), limit=max(64, in_time))

    def work(
        self,
        engine: registry.Engine,
        tokenizer: models.Tokenizer,
        environments: Environments,
    ) -> None:
        """The story: one stream of problems through the engine; score and send what comes out."""
        self._train_set = environments.digest
        draws = ProblemSampler(
            list(environments.sizes.values()),
            seed=self._config.run.seed, ratios=self._config.curriculum.env_ratios,
        )  # fmt: skip
        while not self._done:
            answers = ask(
                engine, tokenizer, self._turns(engine, draws, environments.problems),
                num_generations=self._config.sampling.num_generations,
                sampling=self._sampling(engine.step),
                between_steps=lambda: self._between_steps(engine),
            )  # fmt: skip
            try:
                for problem, completions in answers:
                    self._under_way -= 1
                    self._score_and_send(problem, completions, environments)
                    if self._done:
                        break
                self._under_way = 0  # an evaluation may have cancelled some
                if not self._done:
                    self._evaluate(engine, tokenizer)
            except StaleRunError as error:
                self._under_way = 0
                logger.info("%s are given up", error)
            except EngineError as error:
                self._give_up(engine, error)
        self._report(last=True)
        logger.info("run complete: groups=%d", self._sequence)

    def _give_up(self, engine: registry.Engine, error: EngineError) -> None:
        """Go back from weights that do not compute to the newest others."""
        number = self._version.number
        logger.warning("gave up the groups under way: version=%d reason=%s", number, error)
        self._under_way = 0
        self._follower.reject()
        while not self._done and self._version.number == number:
            self._done = self._is_over(self._hear(timeout=0.2))
            with suppress(StaleRunError):
                self._refresh(engine)

    def _evaluate(self, engine: registry.Engine, tokenizer: models.Tokenizer) -> None:
        """Answer our share of the held-out examples with the weights that we have."""
        heard, config = self._line.listener.latest, self._config
        if heard is None or not self._has_to_evaluate(engine):
            return
        self._evaluated = step = heard.evaluation_step
        try:
            held_out = open_environments(config, "eval", limit=config.eval.num_examples)
        except TaskError as error:
            logger.warning("no part in the evaluation of step %d: %s", step, error)
            return
        answers = ask(
            engine, tokenizer, self._examples(step, held_out.problems),
            num_generations=config.eval.rollouts_per_example,
            sampling=build.make_eval_sampling(config, seed=self._seed(f"evaluation {step}")),
            between_steps=self._report_when_due,
        )  # fmt: skip
        with closing(held_out):
            for problem, completions in answers:
                self._under_way -= 1
                self._score_and_send(problem, completions, held_out, evaluation_step=step)
                if self._done:
                    break

    def _examples(self, step: int, problems: Sequence[Problem]) -> Iterator[Problem | None]:
        """Examples without an answer, as far as we hear, as long as the evaluation goes on; None
        while what is made cannot be kept.
        """
        generator = self._config.generator

        def answered(place: int) -> bool:
            heard = self._hear()
            return heard is not None and is_excluded(heard.answered, place)

        todo = examples_for(
            len(problems), index=generator.index, count=generator.count, answered=answered
        )

        def is_over() -> bool:
            latest, asked = self._line.listener.latest, (self._version.run_id, step)
            return self._done or (
                latest is not None and (latest.run_id, latest.evaluation_step) != asked
            )

        for place in todo:
            while not self._catch_up(self._hear()) and not is_over():
                self._rest()
                yield None
            if is_over():
                return
            self._under_way += 1
            yield problems[place]

    def _next_problem(
        self, step: int, draws: ProblemSampler, problems: Sequence[Problem]
    ) -> Problem:
        """The problem of our next draw; after a start the first that nobody has made, as far as
        the trainer says, else about as many as were trained.
        """
        if self._todo is None:
            generator, heard = self._config.generator, self._line.listener.latest
            known = heard is not None and heard.run_id == self._version.run_id
            start = (
                heard.next_sample_index if heard and known else step * self._config.groups_per_step
            )
            self._todo = assigned_samples(
                draws, index=generator.index, count=generator.count, start=start,
                excluded=self._rests,
            )  # fmt: skip
        draw, position = next(self._todo)
        return replace(problems[position], sample_index=draw)

    def _rests(self, position: int) -> bool:
        heard = self._line.listener.latest
        return (
            heard is not None
            and heard.train_set_digest == self._train_set
            and is_excluded(heard.excluded, position)
        )

    def _sampling(self, step: int) -> Sampling:
        return build.make_sampling(self._config, seed=self._seed(f"{step}/{self._sequence}"))

    def _seed(self, what: str) -> int:
        who = f"{self._config.run.seed}/{self._outbox.sender}/{what}"  # never the same draws again
        return zlib.crc32(who.encode())

    def _turns(
        self, engine: registry.Engine, draws: ProblemSampler, problems: Sequence[Problem]
    ) -> Iterator[Problem | None]:
        """The next problem whenever it is our turn, None when not; ends when the run is done, or
        when there is something to evaluate.
        """
        while not self._done:
            if self._is_our_turn(engine):
                self._under_way += 1
                self._pace.count()
                yield self._next_problem(engine.step, draws, problems)
                continue
            if self._has_to_evaluate(engine):
                if self._config.eval.cancel_inflight_rollouts_on_eval:
                    engine.cancel()
                return
            self._rest()
            yield None

    def _is_our_turn(self, engine: registry.Engine) -> bool:
        """Whether a further group may be started; notes when the run is complete."""
        self._refresh(engine)
        heard = self._hear()
        has_room = self._catch_up(heard)
        if heard and heard.groups_in_step and self._config.train.token_batch_size:
            self._pace.groups_per_step = math.ceil(heard.groups_in_step * self._factor)
        busy = self._done or self._draining or self._has_to_evaluate(engine)
        ready = has_room and not busy
        return ready and self._pace.allows(
            step=engine.step,
            begun=heard.started_step if heard else engine.step,
            under_way=self._sequence + self._under_way - self._taken(heard),
            generators=len(heard.received) if heard else 1,
            hungry=heard is not None
            and heard.waiting
            and not self._outbox.in_flight + self._under_way,
        )

    def _catch_up(self, heard: wire.Announcement | None) -> bool:
        """Send again what was lost, and note when the run is complete; whether one more group can
        be kept, without an older one being given up.
        """
        self._done = self._done or self._is_over(heard)
        for frame in self._outbox.frames_to_resend(heard):
            self._done = self._done or not self._send(frame)
        return self._done or self._outbox.has_room(self._under_way)

    def _rest(self) -> None:
        """Without a turn to sample: wait for news a moment, unless the engine has work."""
        if not self._under_way:
            started = time.monotonic()
            self._hear(timeout=IDLE_SECONDS)
            self._blocked += time.monotonic() - started

    def _has_to_evaluate(self, engine: registry.Engine) -> bool:
        heard = self._line.listener.latest
        return (
            heard is not None
            and heard.run_id == self._version.run_id
            and self._evaluated < heard.evaluation_step <= engine.step
        )

    def _taken(self, heard: wire.Announcement | None) -> int:
        """How many of our groups are in steps that have begun, or dropped; as we heard it last,
        where a trainer that has not heard of us for long does not say.
        """
        if heard and self._outbox.sender in heard.consumed:
            self._known_taken = heard.consumed[self._outbox.sender] + 1
        return self._known_taken

    def _hear(self, *, timeout: float = 0.0) -> wire.Announcement | None:
        """The newest announcement of the run whose weights we serve; reports in return."""
        self._report_when_due()
        heard = self._line.listener.receive(timeout=timeout)
        self._say_silence()
        if heard is not None:
            self._follower.notify(heard.version, heard.weights_id)
        return heard if heard is not None and heard.run_id == self._version.run_id else None

    def _say_silence(self) -> None:
        now, heard_at = time.monotonic(), self._line.listener.received_at
        if now - max(heard_at, self._silence_said) > SILENT_SECONDS:
            self._silence_said = now
            self._is_left = self._version.step >= self._config.train.max_steps
            logger.info("the trainer is not heard; what is made waits for it")

    def _is_over(self, heard: wire.Announcement | None) -> bool:
        """The trainer says so; or it is silent and we serve the last weights: its last words are
        easily missed."""
        return self._is_left or (heard is not None and heard.done)

    def _refresh(self, engine: registry.Engine) -> None:
        """Apply a newer version, at once or when the groups under way have ended."""
        wait = self._under_way > 0 and self._config.weights.update == "between_groups"
        self._draining = wait and self._follower.poll() is not None
        if wait:
            return
        before, started = self._version, time.monotonic()
        version = refresh(engine, self._follower, before)
        if version is not before:
            self._reload_seconds = time.monotonic() - started
            if version.run_id != before.run_id:
                self._begin(version, os.urandom(8))
                raise StaleRunError(f"another run: {version.run_id}; groups for the last one")
            self._serve(version)
            if version.step == before.step and version.field("result") == before.field("result"):
                return  # published again
            if version.lineage != before.lineage or version.step <= before.step:
                # Rolled back: a token's step would no longer tell whose it is.
                if version.number > before.number:  # else it was given back
                    self._evaluated = -1
                raise StaleRunError(f"at step {version.step} of another line; groups under way")

    def _between_steps(self, engine: registry.Engine) -> None:
        """New weights at once, and a word to the trainer however long a group takes."""
        self._refresh(engine)
        self._report_when_due()

    def _report_when_due(self) -> None:
        if self._line.counters.due:
            self._report()

    def _report(self, *, last: bool = False) -> None:
        """Tell the trainer how we fare."""
        now, self._tokens, tokens = time.monotonic(), 0, self._tokens
        elapsed, self._reported = max(now - self._reported, 1e-3), now
        queued, self._queued = self._queued, 0.0
        blocked, self._blocked = self._blocked + queued, 0.0
        self._line.counters.send(
            wire.GeneratorStatus(
                run_id=self._version.run_id,
                generator_id=self._name,
                incarnation=self._boot,
                made=self._sequence,
                lost=self._outbox.lost,
                resent=self._outbox.resent,
                unjudged=self._unjudged,
                step=self._version.step,
                tokens_per_s=tokens / elapsed,
                blocked_frac=min(1.0, blocked / elapsed),
                queue_frac=min(1.0, queued / elapsed),
                reload_s=self._reload_seconds,
                wants_keyframe=self._follower.wants_keyframe,
                last=last,
                worker_info=self._hello,
            )
        )

    def _serve(self, version: Version) -> None:
        self._version = version
        self._ids[version.step] = version.run_id, version.weights_id

    def _score_and_send(
        self,
        problem: Problem,
        completions: Sequence[Completion],
        environments: Environments,
        *,
        evaluation_step: int = -1,
    ) -> None:
        """One group on its way; one that cannot be scored is given up, counted and never worth 0.

        Raises TaskError when many in a row cannot be scored.
        """
        try:
            group = self._group_of(problem, completions, environments, evaluation_step)
        except RewardError as error:
            self._failures += 1
            if self._failures == MAX_FAILURES:
                raise
            self._unjudged += 1
            logger.warning("gave up a group: %s", error)
            return
        self._failures = 0
        self._done = not self._send_new(group) or self._done

    def _group_of(
        self,
        problem: Problem,
        completions: Sequence[Completion],
        environments: Environments,
        evaluation_step: int,
    ) -> RolloutGroup:
        rollouts = tuple(
            rollout_of(each, environments.reward(problem, each.text)) for each in completions
        )
        oldest = min(int(each.policy_steps.min()) for each in completions)
        run_id, weights_id = self._ids[oldest]
        sequence, self._sequence = self._sequence, self._sequence + 1
        return RolloutGroup(
            run_id=run_id,
            generator_id=self._name,
            incarnation=self._boot,
            sequence=sequence,
            problem_id=problem.id,
            task=problem.task,
            policy_step=oldest,
            weights_id=weights_id,
            rollouts=rollouts,
            min_sequence=self._outbox.min_sequence,
            sample_index=problem.sample_index,
            evaluation_step=evaluation_step,
        )

    def _send_new(self, group: RolloutGroup) -> bool:
        logger.debug(
            "made group=%s/%d step=%d weights_id=%s%s%s",
            group.sender, group.sequence, group.policy_step, group.weights_id,
            f" newest={group.newest_step}" if group.newest_step > group.policy_step else "",
            f" evaluation_step={group.evaluation_step}" if group.evaluation_step >= 0 else "",
        )  # fmt: skip
        failpoint("generator.made")
        try:
            frame = wire.encode_group(group)
        except WireError as error:  # the next group's min_sequence tells the trainer
            logger.warning("lost group=%s/%d reason=%s", group.sender, group.sequence, error)
            self._outbox.skip(group.sequence)
            return True
        lost = self._outbox.add(group.sequence, frame)
        if lost is not None:
            logger.warning("lost group=%s/%d reason=outbox", group.sender, lost)
        self._tokens += sum(each.num_generated for each in group.rollouts)
        sent = self._send(frame)
        failpoint("generator.sent")
        return sent

    def _send(self, frame: bytes) -> bool:
        """Wait for room in the queue; False when the run is complete instead."""
        started = time.monotonic()
        said = started
        while not self._line.sender.send(frame, timeout=0.2):
            heard = self._hear()
            if self._is_over(heard):
                return False
            if time.monotonic() - said > WAITING_SECONDS:
                said = time.monotonic()
                logger.info("waiting for the trainer to take a group (%.0f s)", said - started)
        self._queued += time.monotonic() - started
        return True
