"""Error classes, named after what failed.

PeraltaError
 +-- ConfigError      a setting, a file that it names, or a combination of settings
 +-- WireError        an address, a port, or an invalid message
 +-- StoreError       the weights folder, or a version in it
 |    +-- GoneError   the weights folder is missing; it may not be mounted
 |    +-- ChainError  a weight delta that needs a version which cannot be read
 +-- JournalError     the journal or a checkpoint
 +-- TaskError        a data file, a row, an answer, a reward function
 |    +-- RewardError a reward function that fails on a completion
 +-- UserCodeError    a user's loss, advantage or filter that fails
 +-- EngineError      weights that give logits which are not finite
 +-- TrainingError    optimizer steps that are impossible
 +-- RankError        a process of a distributed trainer

The message is one line with the value and the remedy. A program prints it and exits with code 2.
"""

from __future__ import annotations

import traceback


class PeraltaError(Exception):
    """Base class; `str(error)` is one line for the user."""


class ConfigError(PeraltaError):
    """A setting is unknown, invalid, contradictory, or names something that does not exist."""


class WireError(PeraltaError):
    """A socket cannot be bound, or a message violates the protocol."""


class StoreError(PeraltaError):
    """A weights folder cannot be used, or a version in it fails verification."""


class GoneError(StoreError):
    """The weights folder of this run is missing, for example because a NAS is not mounted."""


class ChainError(StoreError):
    """A weight version is a delta, and a version that it builds on is missing or damaged.

    Publishing a keyframe, which is a whole version, ends the chain of deltas and the error.
    """


class JournalError(PeraltaError):
    """A journal or checkpoint cannot be read, or belongs to another run."""


class TaskError(PeraltaError):
    """A data file, a row of it, or a reward function is wrong."""


class RewardError(TaskError):
    """A reward function raised, timed out, or returned no usable number."""


class UserCodeError(PeraltaError):
    """A user's loss, advantage or filter raised, timed out, or returned an invalid result."""


class EngineError(PeraltaError):
    """The weights give logits that are not finite; the requests in flight are aborted."""


class TrainingError(PeraltaError):
    """Several optimizer steps in a row were skipped because the gradient was not finite."""


class RankError(PeraltaError):
    """A rank, one process of a distributed trainer, cannot be reached or has exited."""


def described(error: BaseException) -> str:
    """Type, message, file and line of an exception, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{location}"
