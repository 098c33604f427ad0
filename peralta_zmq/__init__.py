"""Reinforcement learning of language models with verifiable rewards, over ZeroMQ.

Generators sample completions for problems, score them with a reward function and push groups of
rollouts to one trainer. The trainer checks, journals and packs the groups, takes training steps
and publishes weight versions, which generators verify and load in place. Generators and trainer
exchange data only through the wire (ZeroMQ messages) and the weight store (a folder, an HTTP server
or an object store). Each process can be killed and restarted independently of the others.

 generator                                            wire                      trainer
 Problem -> engine -> reward -> RolloutGroup -> encode ==PUSH/PULL==> decode -> admit (+ journal)
    ^                                                                              |
    |                                                            pack -> loss -> optimizer step
    |        <== announcements: step, weight version, acknowledgements <==         |
    '-- apply <- verify <- newest complete version <-- weights/step_N/ <-- publish

A version is complete when its folder has STABLE, the file that is written last.

Reading list, about an hour: the files in the order in which a rollout passes them, from sampling to
the loss. Files in parentheses need not be opened; the list says what they do. build/ connects the
parts. Paths are relative to this package.

    rollout.py               data types: Problem, Completion, Rollout, RolloutGroup
    generator/loop.py        starts groups, takes a decode step, scores and sends ended groups
                             (generator/training_groups.py: which problem, and when)
                             (engines/group_sampler.py: K completions of a problem, with turns)
                             (engines/: samples tokens and their logprobs, and loads new weights
                             between two tokens; the hf engine loads them between two batches)
                             (environments/: problems, and their rewards with a timeout)
    generator/trainer_connection.py  sends each group again until the trainer has it on disk
    wire/messages.py         encodes a group as one msgpack frame, and decodes it
                             (wire/group_rules.py: the checks of its content)
                             (wire/sockets.py: PUSH and PULL; invalid messages are counted)
    trainer/collector.py     admits a group to the batch or drops it, and appends it to the journal,
                             the write-ahead log (trainer/journal.py)
    learning/admission.py    decides the outcome of a group, e.g. trained, stale or duplicate
    trainer/loop.py          per step: collect a batch, learn, publish weights, record, checkpoint
    learning/learner.py      per step: advantages, packing, updates of the parameters
                             (learning/advantages.py: advantages, and filters of rollouts)
                             (learning/update.py: loss, backward, optimizer step)
                             (models/scorer.py: forward pass, a logprob per generated token)
                             (learning/unusable_groups.py: groups that would corrupt the update)
    learning/packing.py      groups -> prefix trees, which share the prompt -> micro-batches
    learning/losses.py       the loss, composed of parts (learning/composition.py: named losses)

Other questions:

    how weights return       weights/subscriber.py finds new versions (weights/store.py), copies and
                             verifies them (weights/replica.py); its docstring lists all checks.
                             generator/weight_sync.py loads them into the engine
    what happens on restart  bin/lan starts a killed program again (operate/process_group.py, called
                             by operate/local.py and operate/supervisor.py). trainer/session.py
                             locks the run folder; trainer/recovery.py restores the newest
                             checkpoint and replays the journal; generators send again what was
                             not on disk (generator/trainer_connection.py)
    what makes a group stale learning/admission.py
    where settings go        config/ reads them, build/ makes objects from them
    how much memory is used  memory/ plans it; build/memory_checks.py compares with the machine
    how to extend it         registry.py has the protocols and names of tasks, engines, losses and
                             filters; CONTRIBUTING.md lists what a new task or loss touches
    how runs are watched     observe/: metrics, terminal, dashboard, and the verdict, a sentence
                             that names the bottleneck
    how chats are served     generator/serving/: HTTP server, and the queue of chats
    how runs are started     bin/ and operate/, on this machine or over ssh; bin/doctor checks the
                             machines first

Import layers (tests/test_layers.py). A module may import its own package, and:

    0  rollout, errors, atomic_files, http_server, compiler: the standard library and numpy
    1  config, registry, wire, weights, models, learning, environments, observe: layer 0
    2  engines: layer 0, models, and registry for the protocol of an engine
    3  memory: layer 0, config, learning, models, weights and engines, whose tensors it counts
    4  build: layers 0 to 3
    5  generator, trainer: layers 0 to 4, but never each other
    6  operate and the programs in bin/: layer 0, config, observe and wire; any other package only
       inside functions
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peralta_zmq.api import Run, load_run, open_policy, train

__all__ = ["Run", "load_run", "open_policy", "train"]


def __getattr__(name: str) -> Any:
    """Import the front door when it is used, so that programs start without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from peralta_zmq import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return __all__
