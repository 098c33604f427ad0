"""The settings of environments: what is asked, in which proportions, and who judges.

Knows what combinations make sense; reads no file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from urllib.parse import urlsplit

from pydantic import PositiveFloat, PositiveInt

from peralta_zmq.config.section import PLAIN_NAME, Names, Numbers, Port, Section, Share, Text
from peralta_zmq.errors import ConfigError

HASH_KEYS = ("task", "prompt", "answer", "id")


class DataSection(Section):
    """The problems; None = what the task itself says."""

    train: Text | None = None
    """problems to train on: a shipped set (math_1k) or a path to CSV or JSONL"""
    eval: Text | None = None
    """held-out problems: a shipped set (math_250) or a path to CSV or JSONL"""
    prompt_column: Text | None = None
    """column that holds the question; a row may carry input_token_ids instead"""
    answer_column: Text | None = None
    """column that holds the answer; the model never sees it"""
    system_prompt: str | None = None
    """system message before every question"""


class EnvSection(DataSection):
    """One of several environments; alone, [task] and [data] say the same."""

    name: Text | None = None
    """name in metrics, and at the verifier; None = the task's"""
    task: Text = "calculator"
    """a shipped task, or the dotted name of a module of your own"""
    address: Text | None = None
    """http://HOST:PORT of a bin/verifier, which has the problems and judges; None = here"""

    @property
    def label(self) -> str:
        """The name by which problems and groups know it."""
        return self.name or self.task

    @property
    def data_options(self) -> dict[str, str]:
        """Keywords for the task's `problems`; defaults left to the task."""
        return self.model_dump(include=set(DataSection.model_fields), exclude_none=True)


class CurriculumSection(Section):
    """Which problems are drawn."""

    env_ratios: Numbers | None = None
    """share of each [[env]] in the draws, in their order; None = natural proportions"""
    hash_keys: Names = ("task", "prompt")
    """what tells one problem from another: task, prompt, answer, id (the task's own)"""
    easy_threshold: Share | None = None
    """problems with at least this mean reward rest in the easy pool; None = off"""
    hard_threshold: Share | None = None
    """problems with at most this mean reward rest in the hard pool; None = off"""
    easy_fraction: Share = 0.0
    """share of the easy pool that is drawn again when a run is resumed"""
    hard_fraction: Share = 0.0
    """share of the hard pool that is drawn again when a run is resumed"""
    online_difficulty_filtering: bool = False
    """drop groups whose mean reward is exactly 0 or 1 and wait for others"""
    oversampling_factor: PositiveFloat = 1.0
    """groups under way, as a multiple of what a step takes; for filtering, 1 or more"""


class EvalSection(Section):
    """Held-out accuracy before, during and after training."""

    interval: PositiveInt = 100
    """optimizer steps between two evaluations by the generators"""
    num_examples: int = -1
    """held-out problems of each environment to answer; -1 = all"""
    rollouts_per_example: PositiveInt = 1
    """answers to each: one is greedy, more are drawn as in training, for pass@k and avg@k"""
    eval_base_model: bool = True
    """also measure the model before training"""
    skip_eval_on_resume: bool = True
    """do not evaluate the step at which a run is resumed"""
    cancel_inflight_rollouts_on_eval: bool = False
    """give up the groups under way when an evaluation begins, instead of finishing them"""
    env: tuple[EnvSection, ...] = ()
    """environments to evaluate, as [[eval.env]]; none = those of training"""


class VerifierSection(Section):
    """What bin/verifier listens on."""

    host: Text = "127.0.0.1"
    """address on which it listens; beyond this machine it needs a token_file"""
    port: Port = 5560
    """its port"""
    token_file: Text | None = None
    """file of mode 0600 with the password, the same on every machine"""


def check_environments(
    environments: Sequence[EnvSection], eval_environments: Sequence[EnvSection]
) -> None:
    """Raise ConfigError for two of one name, or an address that is none."""
    for option, group in (("env", environments), ("eval.env", eval_environments)):
        for label, count in Counter(each.label for each in group).items():
            if count > 1:
                raise ConfigError(
                    f"{option}.name '{label}' stands for {count} environments; "
                    "give each a name of its own"
                )
        for each in group:
            if each.name is not None and not PLAIN_NAME.fullmatch(each.name):
                raise ConfigError(
                    f"{option}.name {each.name!r} is not a plain name; "
                    "use letters, digits, . _ and -"
                )
            if each.address is not None:
                host_and_port(each.address, option=f"{option}.address")


def host_and_port(address: str, *, option: str) -> tuple[str, int]:
    """Of http://HOST:PORT. Raises ConfigError naming the option."""
    parts = urlsplit(address)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if parts.scheme != "http" or not host or not port or parts.path.strip("/") or parts.query:
        raise ConfigError(f"{option} '{address}' is not http://HOST:PORT")
    return host, port


def check_curriculum(chosen: CurriculumSection, *, num_environments: int) -> None:
    """Raise ConfigError for shares, keys or bounds that make no sense together."""
    ratios = chosen.env_ratios
    if ratios is not None:
        _check_ratios(ratios, num_environments)
    strange = [key for key in chosen.hash_keys if key not in HASH_KEYS]
    if strange or not chosen.hash_keys:
        raise ConfigError(
            f"curriculum.hash_keys has {strange[0] if strange else 'no key'!r}; "
            f"choose from {', '.join(HASH_KEYS)}"
        )
    easy, hard = chosen.easy_threshold, chosen.hard_threshold
    if easy is not None and hard is not None and hard >= easy:
        raise ConfigError(
            f"curriculum.hard_threshold {hard} is not below curriculum.easy_threshold {easy}; "
            "between the two lie the problems that are drawn"
        )
    if chosen.oversampling_factor < 1:
        raise ConfigError(
            f"curriculum.oversampling_factor {chosen.oversampling_factor} would starve the "
            "trainer; use 1 or more"
        )


def _check_ratios(ratios: Sequence[float], num_environments: int) -> None:
    shown = ", ".join(f"{each:g}" for each in ratios)
    if len(ratios) != num_environments:
        raise ConfigError(
            f"curriculum.env_ratios has {len(ratios)} numbers ({shown}) for {num_environments} "
            "environments; give one for each [[env]]"
        )
    if min(ratios) < 0 or not 0 < math.fsum(ratios) < math.inf:
        raise ConfigError(
            f"curriculum.env_ratios {shown} must be 0 or more and not all 0; "
            "or leave them out for natural proportions"
        )
