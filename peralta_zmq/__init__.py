"""Reinforcement learning of language models with verifiable rewards, over ZeroMQ.

Generators sample completions for problems, score them with a reward function and push groups of
rollouts to one trainer. The trainer checks, journals and packs the groups, takes optimizer steps
and publishes weight versions, which generators verify and load in place. The two programs exchange
data through the wire (ZeroMQ messages) and the weight store (a folder, HTTP server or object store)
only. Any process can be killed and restarted alone.

 generator                                            wire                      trainer
 Problem -> engine -> reward -> RolloutGroup -> encode ==PUSH/PULL==> decode -> admit (+ journal)
    ^                                                                              |
    |                                                            pack -> loss -> optimizer step
    |       <== announcements (PUB/SUB: step, weight version, acknowledgements) == |
    '-- apply <- verify <- newest STABLE <-- weights/step_N/ {model, manifest, STABLE} <-- publish

Files in the order in which a rollout passes through them, about an hour of reading:

    rollout.py              data types: Problem, Completion, Rollout, RolloutGroup
    generator/loop.py       choose problems, sample, score, send
    generator/trainer_connection.py  send groups and resend them until they are journaled
    wire/messages.py        encode, decode and validate a group
    wire/sockets.py         send and receive groups
    trainer/collector.py    admit or drop groups, journal and acknowledge them
    learning/admission.py   decide whether a group is stale, a duplicate, without signal
    trainer/loop.py         collect a batch, learn, publish, record, save
    learning/learner.py     one step: filter, pack, logprobs, loss, backward, optimizer
    learning/advantages.py  filters, and advantages from rewards
    learning/packing.py     groups -> prefix trees and micro-batches
    models/scoring.py       logprobs of packed tokens: the forward pass
    learning/losses.py      loss functions

The way back of the weights: weights/publisher.py, weights/store.py, weights/subscriber.py and
generator/weight_sync.py. registry.py lists the plug-ins; build.py makes objects from the settings.

Layers (tests/test_layers.py); a module imports its own package and the layers named:

    0 types    rollout errors atomic_files http_server: standard library and numpy
    1 leaves   config registry wire weights models learning environments observe: layer 0
    2 engines  layer 0 and models
    3 build    layers 0 to 2
    4 loops    generator, trainer: layers 0 to 3, never each other
    5 outside  operate and the programs in bin/: types, config, observe, wire; the rest lazily
"""
