"""Reinforcement learning of language models with verifiable rewards, on machines you own.

    import peralta_zmq as pz

    def score(completions, answer, **columns):  # one reward per completion, as in TRL
        return [float(text.rstrip(". ").endswith(right))
                for text, right in zip(completions, answer)]

    rows = [{"prompt": "Ann has 3 boxes of 4 pens. How many pens does she have?", "answer": "12"}]
    run = pz.train("FOLDER", rows, score, max_steps=30)
    run.wait()                                      # shows the progress
    print(run.chat("How much is 3 + 4?"), run.verdict)
    run.export("out")                               # a Hugging Face folder

train         start a run: one trainer and generators, in processes of their own on this machine.
              FOLDER is a Hugging Face model; rows, a file or a folder are the data. With the name
              of an existing run, continue it.
Run           what `train` returns: wait, stop, metrics, frame, samples, evaluations, answers,
              verdict, evaluate, chat, export, fork. A run is a folder; a crash of its processes,
              or of this one, loses nothing that was trained.
load_run      a Run from its folder, such as "runs/demo", running or ended.
open_policy   a model, or the newest weights of a run, to sample from: chat, and sample with tokens
              and logprobs.

`help(peralta_zmq.train)` and so on have the details. Errors derive from PeraltaError in
peralta_zmq.errors: ConfigError for wrong settings, RunError for a run that failed. docs/python.md
has more examples, docs/config.md all settings, docs/code.md the reading list of the source.
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
