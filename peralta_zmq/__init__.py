"""peralta_zmq: reinforcement learning with verifiable rewards on the machines you own.

Generators make scored groups of rollouts and push them; one trainer turns groups into optimizer
steps and publishes weights. They meet in two places only: the wire (ZeroMQ) and the weight store
(a folder that all machines see).

     generator                                    wire                  trainer
     Problem -> ask -> reward -> RolloutGroup -> encode ==PUSH/PULL==> decode -> admit -> journal
        ^        (engine) (task)                                          |
        |                                                         Batch -> loss -> step
        |      <=== announcements (PUB/SUB: a hint, never the truth) ===  |
        '-- apply <- verify <- newest STABLE <- store: step_N/ <- publish-'

Read in this order; it takes half an hour, and everything else is a plug:
    rollout     the nouns
    wire        sockets and bytes
    generator   its loop
    trainer     its loop
    learning    advantages, losses, batches, the step

Layers, each importing only from above:
    words       rollout errors atomic_files failpoints
    leaves      config registry wire policy tasks learning curriculum stores recovery observe
                guard
    engines     ways to sample
    objective   from the settings to the loss, the advantages and the filters
    frozen      from the settings to the models that a loss asks beside the policy
    adapted     from the settings to adapters, and from adapters to whole weights
    environments from the settings to what is asked, and who judges
    parts       from the settings to what more than one loop needs
    loops       generator trainer verifier (and base, which teaches the embedded model)
    outside     operate and the doors in bin/
"""
