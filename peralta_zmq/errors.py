"""Error classes, named after the boundary that failed.

PeraltaError
 +-- ConfigError      a setting, a file that it names, or a combination of settings
 +-- WireError        an address, a port, or an invalid message
 +-- StoreError       the weights folder, or a version in it
 |    +-- GoneError   the weights folder is missing; it may not be mounted
 |    +-- ChainError  a delta whose keyframe or earlier delta cannot be read
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
    """This run's weights folder is missing; it may come back."""


class ChainError(StoreError):
    """A version between a delta and its keyframe is missing or damaged; a new keyframe helps."""


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
    """Several steps in a row had no finite gradient; the weights are unchanged since."""


class RankError(PeraltaError):
    """A rank of a distributed trainer cannot be reached, or has exited."""


def described(error: BaseException) -> str:
    """An exception on one line, with the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{location}"
