"""The generator loop: sample completions, score them, send them to the trainer.

A restarted generator continues from the weights and the trainer's announcements alone.
"""

from __future__ import annotations

import logging

from peralta_zmq import registry
from peralta_zmq.build import dry_run
from peralta_zmq.config import Config
from peralta_zmq.engines import Sampler
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.errors import EngineError, EngineProcessError
from peralta_zmq.generator.evaluation_groups import EvaluationGroups
from peralta_zmq.generator.scoring import ScoringQueue
from peralta_zmq.generator.serving.chats import ChatQueue
from peralta_zmq.generator.trainer_connection import TrainerConnection
from peralta_zmq.generator.training_groups import TrainingGroups
from peralta_zmq.generator.weight_sync import ServedWeights

IDLE_SECONDS = 0.002  # maximum wait for an announcement while the engine has no group
MAX_ENGINE_FAILURES = 3  # of the engine's process without a group in between
logger = logging.getLogger(__name__)


class Generator:
    """Samples, scores and sends groups for the problems of a run, until the run ends."""

    def __init__(
        self,
        config: Config,
        engine: registry.Engine,
        reader: dry_run.PromptReader,
        environments: Environments,
        weights: ServedWeights,
        link: TrainerConnection,
        chats: ChatQueue,
    ) -> None:
        self._engine, self._weights, self._link, self._chats = engine, weights, link, chats
        self._sampler = Sampler(engine, reader.tokenizer, max_turns=config.task.max_turns)
        self._rewards = ScoringQueue(weights, link)
        self._training = TrainingGroups(config, environments, weights, link, self._rewards)
        self._evaluation = EvaluationGroups(
            config, reader, self._training, weights, link, self._rewards
        )
        self._keeps_weights = config.weights.update == "between_groups"  # within a group
        self._num_engine_failures = 0  # of the engine's process since the last finished group

    def run(self) -> None:
        """Make training groups and announced evaluations until the run is complete."""
        link, sampler, rewards = self._link, self._sampler, self._rewards
        sources = self._evaluation, self._training, self._chats
        try:
            while not link.is_run_complete:
                try:
                    self._apply_due()
                    if self._weights.are_applied:
                        for source in sources:
                            source.submit_due(sampler)
                    is_idle = not sampler.num_in_flight
                    ended = sampler.advance()
                except EngineError as error:
                    self._recover(error)
                    continue
                self._chats.complete(ended)
                if groups := self._training.take(ended) + self._evaluation.take(ended):
                    self._num_engine_failures = 0
                    rewards.add(groups)
                link.num_resumed = sampler.num_resumed
                for group in rewards.finished():
                    link.send(group)
                    if link.is_run_complete:
                        break
                timeout = IDLE_SECONDS if is_idle else 0.0
                can_start = self._weights.are_applied and not rewards
                link.exchange(timeout=timeout, is_idle=is_idle and can_start)
        finally:  # a thread of engine hf would keep the model for the next start
            self._evaluation.drop(sampler)
            self._training.drop(sampler)
        link.send_status(last=True)
        logger.info("run complete: groups=%d", link.outbox.next_sequence)

    def _apply_due(self) -> None:
        """Apply newer weights if there are any; an evaluation keeps those that it began with.

        Drops the groups in flight if they are useless with the new weights.
        """
        if self._evaluation.is_running:
            return
        num_in_flight = len(self._training.groups)
        obsolete = self._weights.apply_due(self._engine, num_in_flight=num_in_flight)
        if obsolete is None:
            return
        if obsolete.is_new_run:
            self._link.start_run()
            self._training.start_run()
        if not obsolete.is_rejection:
            self._evaluation.repeat()
            self._rewards.discard()
        self._training.drop(self._sampler)
        self._chats.interrupt(self._sampler)
        logger.info("dropped groups in flight: %s", obsolete.reason)

    def _recover(self, error: EngineError) -> None:
        """Let the engine get weights again.

        Weights with non-finite logits are quarantined, and the groups in flight dropped. An engine
        whose process failed gets the newest weights again, and then resumes the training groups,
        except those of an earlier failure: they may be the cause. All are dropped if it fails again
        without a group in between; the MAX_ENGINE_FAILURES-th time, this raises `error`.
        """
        version, sampler, training = self._weights.version, self._sampler, self._training
        self._chats.interrupt(sampler)
        num_dropped = self._evaluation.drop(sampler)
        if isinstance(error, EngineProcessError):
            self._num_engine_failures += 1
            if self._num_engine_failures == MAX_ENGINE_FAILURES:
                raise error
            sampler.interrupt(training.groups)
            # The newest weights may be newer than those of the groups.
            if self._num_engine_failures > 1 or self._keeps_weights:
                num_dropped += training.drop(sampler)
            num_dropped += training.drop_failed(sampler)
            self._link.num_aborted += num_dropped
            self._evaluation.repeat()  # an interrupted evaluation goes on
            self._weights.request_again()
        else:
            num_dropped += training.drop(sampler)
            self._weights.reject()
        logger.warning(
            "engine failed: version=%d dropped=%d reason=%s", version.number, num_dropped, error
        )
