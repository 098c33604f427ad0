"""peralta_zmq: reinforcement learning with verifiable rewards on the machines you own.

Generators sample and score groups of rollouts and push them to one trainer; the trainer takes
optimizer steps and publishes weights. The two sides meet in two places only: the wire (ZeroMQ) and
the weight store (a folder that all machines share).

     generator                                       wire                  trainer
     Problem -> engine -> reward -> RolloutGroup -> encode ==PUSH/PULL==> decode -> admit -> journal
        ^                                                                 |
        |                                                         batch -> loss -> optimizer step
        |      <=== announcements (PUB/SUB: step, version, acknowledgements) ===   |
        '-- apply <- verify <- newest STABLE <- weights/step_N/ <----- publish ----'

Reading order, half an hour for the path of a rollout:
    rollout.py            data types
    generator/loop.py     problems, sampling, rewards, sending
    wire/                 messages and sockets
    trainer/collector.py  admission and batches
    trainer/loop.py       optimizer steps
    learning/             advantages, packing, losses, the learner

Layers, each importing only from above (tests/test_layers.py):
    types    rollout errors atomic_files failpoints
    leaves   config registry wire weights models learning environments observe
    engines  sampling
    build    objects from the config
    loops    generator trainer
    outside  operate, and the programs in bin/
"""
