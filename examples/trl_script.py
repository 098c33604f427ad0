"""A TRL script of which two lines were changed: the import, and the trainer.

from trl import GRPOTrainer
...
GRPOTrainer(MODEL, reward_funcs=score, train_dataset=dataset).train()
"""

import sys
from pathlib import Path

from datasets import Dataset

import peralta_zmq as pz

MODEL = sys.argv[1]  # a folder, e.g. the one that `python -m tools.real_model` prints
ROWS = Path(__file__).with_name("colours.jsonl")


COLOURS = ("red", "blue", "green", "yellow", "black", "white", "brown", "grey")


def score(completions, answer, **columns):
    """Half for naming the right colour and no other, half for naming nothing else."""
    rewards = []
    for text, right in zip(completions, answer, strict=True):
        named = [colour for colour in COLOURS if colour in text.lower()]
        rewards.append(0.5 * (named == [right]) + 0.5 * (text.strip(" .\n").lower() == right))
    return rewards


dataset = Dataset.from_json(str(ROWS))
pz.train(MODEL, dataset, score, max_steps=30).wait()
