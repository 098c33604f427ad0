"""The losses: formulas over `Tokens`, each divided by the totals of the whole step.

A loss is `def name(tokens: Tokens, *, option: float = ...) -> (scalar, metrics)`. It divides by
`tokens.step_tokens` or `tokens.step_sequences` itself, so that micro-batches, their order and
ranks never change the gradient; metrics are divided likewise, so that a step adds them up. Its
keywords are its options in [loss]. A new loss is one function here and one line in the registry.
Knows formulas; knows nothing of models, batches or optimizers.
"""

from peralta_zmq.learning.losses.clipped import decoupled_ppo, grpo, gspo
from peralta_zmq.learning.losses.masked import ORDERED, dppo, importance
from peralta_zmq.learning.losses.policy_gradient import grpo_kl, reinforce

__all__ = ["ORDERED", "decoupled_ppo", "dppo", "grpo", "grpo_kl", "gspo", "importance", "reinforce"]
