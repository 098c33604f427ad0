"""Reinforcement learning of language models with verifiable rewards, over ZeroMQ.

Generators sample completions for problems, score them with a reward function and push groups of
rollouts to one trainer. The trainer checks, journals and packs the groups, takes training steps
and publishes weight versions, which generators verify and load in place. The two programs exchange
data only through the wire (ZeroMQ messages) and the weight store (a folder, HTTP server or object
store). Any process can be killed and restarted alone.

 generator                                            wire                      trainer
 Problem -> engine -> reward -> RolloutGroup -> encode ==PUSH/PULL==> decode -> admit (+ journal)
    ^                                                                              |
    |                                                            pack -> loss -> optimizer step
    |       <= announcements (XSUB/XPUB: step, weight version, acknowledgements) = |
    '-- apply <- verify <- newest STABLE <-- weights/step_N/ {model, manifest, STABLE} <-- publish

From sampling to the loss: the files in the order in which a rollout passes them, about an hour of
reading. What is in parentheses, and other imports, need not be opened: a line says what it does.
(build.py connects the parts: it gives the learner its scorer and its loss.)

    rollout.py               data types: Problem, Completion, Rollout, RolloutGroup
    generator/loop.py        choose a problem, sample K completions, score them, send one group
                             (engines/: sample tokens with their logprobs; new weights apply
                             between two tokens, with the engine hf between two batches)
                             (environments/: problems, and rewards with a timeout)
    generator/trainer_connection.py  resend each group until the trainer has it on disk
    wire/messages.py         a group as one msgpack frame (group_rules.py checks its content;
                             sockets.py: ZeroMQ PUSH/PULL, counts and drops invalid messages)
    trainer/collector.py     admit a group or drop it; append it to the write-ahead log (journal.py)
    learning/admission.py    the decision: duplicate, stale, abandoned, without signal, or trained
    trainer/loop.py          per step: collect a batch, learn, publish weights, record, checkpoint
    learning/learner.py      per step: filters and advantages (advantages.py), pack, loss, backward,
                             optimizer update (models/scoring.py: forward pass, one logprob per
                             generated token; exclusion.py leaves out unusable groups)
    learning/packing.py      groups -> prefix trees (store a shared prompt once) -> micro-batches
    learning/losses.py       loss functions; its docstring says how to add one

Other questions:

    how weights return       weights/subscriber.py (docstring: all checks) finds versions in
                             store.py and copies them to replica.py; generator/weight_sync.py
                             applies them between two tokens; atomic_files.py: manifest and STABLE
    what happens on restart  operate/process_group.py, used by bin/lan, starts a killed worker
                             again; trainer/loop.py locks and claims the folders (session.py);
                             recovery.py restores the newest checkpoint and trains the journal
                             again; generators resend what is not on disk
                             (generator/trainer_connection.py)
    what makes a group stale learning/admission.py
    where settings go        config/ reads them, build.py makes objects from them
    how to extend it         registry.py: protocols and names of tasks, engines, losses, filters;
                             CONTRIBUTING.md lists all that a new task or loss touches
    how runs are watched     observe/: metrics, terminal, dashboard, the bottleneck in one sentence
    how runs are started     bin/, operate/: on this machine or over ssh; bin/doctor checks machines

Layers (tests/test_layers.py); a module imports its own package and the layers named:

    0 types    rollout errors atomic_files http_server: standard library and numpy
    1 leaves   config registry wire weights models learning environments observe: layer 0
    2 engines  layer 0, models, registry (for the protocol of an engine)
    3 build    layers 0 to 2
    4 loops    generator, trainer: layers 0 to 3, never each other
    5 outside  operate and the programs in bin/: types, config, observe, wire; the others are
               imported only inside functions
"""
