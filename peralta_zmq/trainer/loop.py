"""The trainer: collects groups from generators, takes optimizer steps, publishes weights.

After a kill at any moment, the next start continues from the newest checkpoint and the journal; no
received group is lost or trained twice (see recovery.py).
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, closing

from peralta_zmq import models, wire
from peralta_zmq.atomic_files import failpoint, read_private_token
from peralta_zmq.build import open_environments
from peralta_zmq.config import Config, earlier_config
from peralta_zmq.environments.curriculum import MAX_POSITIONS, DifficultyPools
from peralta_zmq.environments.dataset import Environments
from peralta_zmq.errors import ConfigError
from peralta_zmq.learning.distributed import SINGLE, DistributedRanks, Ranks
from peralta_zmq.observe.run_log import RunLog
from peralta_zmq.observe.trackers import check_trackers
from peralta_zmq.trainer import evaluation, publishing, run_folder
from peralta_zmq.trainer.collector import BatchCollector
from peralta_zmq.trainer.generator_registry import GeneratorRegistry
from peralta_zmq.trainer.policy import Policy, final_weights, open_policy
from peralta_zmq.trainer.ranks import join, run_follower, shutdown
from peralta_zmq.trainer.recovery import Recovery
from peralta_zmq.trainer.session import Session, StatusPublisher, StopSignal
from peralta_zmq.trainer.step import StepTrainer
from peralta_zmq.weights.backends import ProbeFile


def run(config: Config) -> None:
    """Train to `train.max_steps`, continuing an earlier session of the run if there is one.

    Under torchrun this process is one of several ranks: rank 0 is the trainer, the others are its
    followers. Raises ConfigError, TaskError, WireError, StoreError or JournalError if a setting, a
    file, a port or a folder cannot be used; nothing is written in that case.
    """
    config, ranks = join(config)
    models.keep_memory()
    if isinstance(ranks, DistributedRanks) and ranks.rank > 0:
        return run_follower(config, ranks)
    with ExitStack() as stack:
        trainer = Trainer(config, stack, ranks)
        trainer.recover()
        trainer.evaluate_base()
        while trainer.unfinished:
            trainer.advance()
        trainer.finish()
        shutdown(ranks)


class Trainer:
    """One session of a run."""

    def __init__(self, config: Config, stack: ExitStack, ranks: Ranks = SINGLE) -> None:
        """Open all resources; `stack` closes them. Writes nothing before the folder is locked."""
        stop = StopSignal()
        previous_config = earlier_config(config, config.run_folder)
        check_trackers(config.run.report_to)
        train = open_environments(config, "train")
        held_out = open_environments(config, "eval", limit=config.eval.num_examples)
        stack.enter_context(closing(held_out))
        evaluation.check_size(config, held_out)
        pools = _open_pools(config, train)
        self.policy = open_policy(config, [*train.problems, *held_out.problems], ranks)
        run_id = run_folder.run_id_of(config.run_folder, config.run.name)
        receiver, status_receiver, status = _open_sockets(
            config, stack, self.policy, run_id, train.digest
        )
        store = publishing.open_store(config)
        run_log, journal = run_folder.open_run_folder(config, stack, store, run_id, stop)
        self.session = Session(config, run_id, run_log, status, stop)
        self.publishing = publishing.WeightPublishing(self.session, store, self.policy, stack)
        self.generators = GeneratorRegistry(status_receiver, run_log, self.policy.worker_info)
        self.evaluations = evaluation.EvaluationCoordinator(self.session, held_out, self.policy)
        self.collector = BatchCollector(
            self.session, receiver, journal, self.generators, pools, self.evaluations
        )
        self.steps = StepTrainer(self.session, self.policy, self.collector, self.generators)
        self.recovery = Recovery(
            self.session, previous_config, self.policy, self.collector, self.steps, self.publishing
        )
        open_dashboard(config, stack, run_log)
        stop.install()  # until here a signal ends the process at once: there is no progress to save

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.policy.learner.step

    @property
    def unfinished(self) -> bool:
        """True if there are steps to take and no stop is requested."""
        is_complete = self.step >= self.session.config.train.max_steps
        return not is_complete and not self.session.stop.requested

    def recover(self) -> None:
        """Continue from the state that earlier sessions saved in the run folder."""
        recovered = self.recovery.run()
        config = self.session.config.eval
        if recovered and self.session.run_log.resuming and not config.skip_eval_on_resume:
            self.evaluations.request(self.step)

    def evaluate_base(self) -> None:
        """Evaluate the untrained model, once per run."""
        if self.session.config.eval.eval_base_model and self.step == 0:
            self.evaluations.evaluate(0)

    def advance(self) -> None:
        """Take one optimizer step: collect, learn, publish, record, save."""
        started = time.monotonic()
        groups, depth = self.collector.collect(self.step + 1, self._between_groups)
        if self.session.stop.requested:
            return
        collected, journal_seconds = time.monotonic(), self.collector.journal_seconds
        failpoint("trainer.collected")
        metrics = self.steps.learn(groups)
        failpoint("trainer.stepped")
        self.steps.mismatch.flag(step=self.step)
        publish_seconds = self.publish()
        metrics |= {
            "queue/depth": depth,
            "time/wait_for_batch": collected - started - journal_seconds,
            "time/journal": self.collector.journal_seconds,
            "time/publish": publish_seconds,
            **self.publishing.metrics(),
        }
        self.steps.record(groups, metrics, step_time=time.monotonic() - started)
        failpoint("trainer.recorded")
        if self.step % self.session.config.eval.interval == 0:
            self.evaluations.request(self.step)
        if self.step % self.session.config.checkpoint.interval == 0:
            self.steps.save()

    def publish(self) -> float:
        """Publish the newest step in the background; returns the seconds that the copy took."""
        # One keyframe serves all requests up to now.
        keyframe, self.generators.keyframe_requested = self.generators.keyframe_requested, False
        return self.publishing.publish(self.step, keyframe=keyframe)

    def finish(self) -> None:
        """Save; then close a complete run with its evaluation, or report how to resume it."""
        step, run_log = self.step, self.session.run_log
        self.collector.commit()
        self.steps.save()
        is_complete = step >= self.session.config.train.max_steps
        stopping = self.session.stop.requested or not is_complete
        self.publishing.wait(publishing.STOP_SECONDS if stopping else publishing.COMPLETE_SECONDS)
        if is_complete:
            self.evaluations.abandon()
            self.collector.acknowledgements.publish(step, started_step=step, done=True)
            # Before the long evaluation: a final status must survive a kill during it.
            self.generators.wait_for_final_statuses(step=step)
        if not (is_complete and self.evaluations.evaluate(step)):
            run_log.end("stop", step=step)
            run_log.note(f"stopped after step {step}, saved; the same command resumes it")
            run_log.write_report()
            return
        self.generators.wait_for_final_statuses(step=step)
        run_log.end("complete", step=step)
        run_log.close_run(
            final_weights(self.session.config, self.policy, self.publishing.store),
            self.collector.accounting(),
            self.generators.num_made,
        )

    def _between_groups(self, idle: bool) -> None:
        """Background work of the collector: record publications, serve a keyframe request."""
        self.publishing.record_reports()
        self.session.run_log.check_stall()
        # While groups arrive, the next step publishes the keyframe soon enough.
        if idle and self.generators.keyframe_requested:
            self.publish()


def _open_pools(config: Config, train: Environments) -> DifficultyPools:
    """Create the pools. Raises ConfigError if an announcement has fewer bits than problems."""
    curriculum = config.curriculum
    pools = DifficultyPools(
        [problem.id for problem in train.problems],
        easy_threshold=curriculum.easy_threshold,
        hard_threshold=curriculum.hard_threshold,
    )
    if pools.active and len(train.problems) > MAX_POSITIONS:
        raise ConfigError(
            f"curriculum.easy_threshold and hard_threshold work with at most {MAX_POSITIONS} "
            f"problems, and there are {len(train.problems)}; leave them out"
        )
    return pools


def _open_sockets(
    config: Config, stack: ExitStack, policy: Policy, run_id: str, train_set: bytes
) -> tuple[wire.RolloutReceiver, wire.GeneratorStatusReceiver, StatusPublisher]:
    """Bind four consecutive ports: rollouts, announcements, generator statuses, doctor probes."""
    address, keys = f"tcp://{config.wire.bind}:{config.wire.port}", config.keys_folder
    authenticator = stack.enter_context(closing(wire.CurveAuthenticator(keys))) if keys else None
    receiver = wire.RolloutReceiver(
        address,
        run_id=run_id,
        vocab_size=policy.vocab_size,
        hwm=config.wire.hwm,
        authenticator=authenticator,
    )
    stack.enter_context(closing(receiver))
    publisher = wire.AnnouncementPublisher(wire.next_port(address), authenticator=authenticator)
    stack.enter_context(closing(publisher))
    statuses = wire.GeneratorStatusReceiver(
        wire.next_port(address, 2), run_id=run_id, authenticator=authenticator
    )
    stack.enter_context(closing(statuses))
    info = wire.ProbeReply(config.run.name, run_id=run_id, worker_info=dict(policy.worker_info))
    is_bucket = "://" in config.weights_address
    create = (
        None if is_bucket else stack.enter_context(closing(ProbeFile(config.weights_folder))).create
    )
    probes = wire.ProbeServer(
        wire.next_port(address, 3), info, create_file=create, authenticator=authenticator
    )
    stack.enter_context(closing(probes))
    announcement = wire.Announcement(run_id, incarnation=os.urandom(8), train_set_digest=train_set)
    return receiver, statuses, StatusPublisher(publisher, announcement)


def open_dashboard(config: Config, stack: ExitStack, run_log: RunLog) -> None:
    """Serve the dashboard in a daemon thread; report any failure, and train without it."""
    settings = config.dashboard
    if not settings.enabled:
        return
    try:
        from peralta_zmq.observe.dashboard.app import Dashboard  # needs the optional packages

        token = read_private_token(settings.token_file, option="dashboard.token_file")
        dashboard = Dashboard(
            [config.run_folder], host=settings.host, port=settings.port, token=token, live=True
        )
        stack.enter_context(closing(dashboard))
        dashboard.start()
    except Exception as error:  # noqa: BLE001 - no failure of the dashboard may stop the training
        reason = error if isinstance(error, ConfigError) else repr(error)
        run_log.note(f"no dashboard: {reason}")
        return
    for line in dashboard.banner:
        run_log.note(line)
