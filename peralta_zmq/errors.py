"""Every error that a person can cause or meet, named after the boundary that failed.

PeraltaError
 +-- ConfigError    a setting, a file it names, or a combination of settings
 +-- WireError      an address, a port, a message that does not fit
 +-- StoreError     a weights folder, or a version in it
 |    +-- GoneError  the folder is not where it was: is it mounted?
 |    +-- ChainError a version whose deltas lead from nothing that can be read
 +-- JournalError   a journal or a checkpoint
 +-- TaskError      a data file, a row, a target, a reward
 |    +-- RewardError  a reward function that fails on an answer
 +-- PartError      a loss, advantage or filter of one's own that fails
 +-- EngineError    weights that do not compute
 +-- TrainingError  steps that cannot be taken
 +-- RankError      a process of a trainer of several

Each carries one line: the value and the remedy. A door prints it and exits with code 2.
"""

from __future__ import annotations

import traceback


class PeraltaError(Exception):
    """Base of all; `str(error)` is one line for a person."""


class ConfigError(PeraltaError):
    """A setting is unknown, mistyped, contradictory, or names something that is not there."""


class WireError(PeraltaError):
    """A socket cannot be bound or a message breaks the protocol."""


class StoreError(PeraltaError):
    """A weights folder cannot be used, or a version in it does not verify."""


class GoneError(StoreError):
    """A weights folder that was this run's is not there; it may come back."""


class ChainError(StoreError):
    """A link between a version and its keyframe is missing or refused; a keyframe would do."""


class JournalError(PeraltaError):
    """A journal or checkpoint cannot be read, or belongs to another run."""


class TaskError(PeraltaError):
    """A data file, a row of it, or a reward function is at fault."""


class RewardError(TaskError):
    """A reward function raised, hung, or gave no usable number; the answer has no reward."""


class UserCodeError(PeraltaError):
    """A loss, advantage or filter of one's own raised, hung, or gave what it may not."""


class EngineError(PeraltaError):
    """The weights give logits that are not finite; what was under way with them is given up."""


class TrainingError(PeraltaError):
    """Several steps in a row had no finite gradient; the weights are as before them."""


class RankError(PeraltaError):
    """A rank of a trainer of several processes cannot be reached, or has ended."""


def described(error: BaseException) -> str:
    """An exception on one line, with the innermost line of code."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{place}"
