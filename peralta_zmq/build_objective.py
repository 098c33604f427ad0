"""From the settings to what is learned: the loss, the advantages and the filters of a run.

An option belongs to the function whose signature has it; what does not fit is refused before
anything is loaded. Functions of one's own are called under guard. Knows the config and learning.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from peralta_zmq import registry
from peralta_zmq.config import Config
from peralta_zmq.errors import ConfigError, UserCodeError
from peralta_zmq.learning.advantages import AdvantageFunction
from peralta_zmq.learning.filters import Filter
from peralta_zmq.learning.losses import ORDERED
from peralta_zmq.learning.losses.entropy import with_entropy_bonus
from peralta_zmq.learning.tokens import TokenLoss, Tokens
from peralta_zmq.rollout import Rollout
from peralta_zmq.user_code import CALL_SECONDS, call_with_timeout

Kind: TypeAlias = Literal["loss", "advantage", "filter"]
Options: TypeAlias = dict[str, Any]
ASKING = {"beta": "reference", "teacher_tau": "teacher"}
POSITIONAL: dict[Kind, int] = {"loss": 1, "advantage": 2, "filter": 1}  # arguments before options


def loss_of(config: Config) -> TokenLoss:
    """What is made small, with its options. Raises ConfigError for one that it does not take."""
    chosen = config.loss
    given = chosen.model_dump(exclude={"name", "kwargs", "entropy_coef"}, exclude_defaults=True)
    function: Callable[..., Any] = registry.resolve("loss", chosen.name)
    options = _options("loss", chosen.name, function, given, chosen.kwargs)
    _check_order(function, options)
    _check_effect(chosen.name, {**options, "entropy_coef": chosen.entropy_coef})
    if not _is_shipped("loss", chosen.name):
        function = _finite(chosen.name, _guarded("loss", chosen.name, function))
    loss = functools.partial(function, **options)
    return with_entropy_bonus(loss, chosen.entropy_coef) if chosen.entropy_coef else loss


def advantage_of(config: Config) -> AdvantageFunction:
    """How rewards become advantages. Raises ConfigError for an option that it does not take."""
    chosen = config.advantage
    given = chosen.model_dump(exclude={"name", "kwargs"}, exclude_defaults=True)
    function: Callable[..., Any] = registry.resolve("advantage", chosen.name)
    options = _options("advantage", chosen.name, function, given, chosen.kwargs)
    if not _is_shipped("advantage", chosen.name):
        function = _guarded("advantage", chosen.name, _as_floats(function))
    return functools.partial(function, **options)


def filters_of(config: Config, *, vocab_size: int) -> list[Filter]:
    """What is looked for in rollouts. Raises ConfigError for an option that a filter lacks."""
    facts = {
        "vocab_size": vocab_size,
        "max_completion_length": config.sampling.max_completion_length,
    }
    chosen: dict[str, tuple[bool, Options]] = {}
    for name, section in config.filter:
        if name != "custom" and section is not None:
            chosen[name] = section.enforce, section.model_dump(exclude={"enforce"})
    for name, own in config.filter.custom.items():
        chosen[name] = own.enforce, own.kwargs
    return [
        Filter(name, _catching(name, options, facts), enforce)
        for name, (enforce, options) in chosen.items()
    ]


def wants(config: Config) -> set[str]:
    """The models that the loss asks beside the policy: 'reference', 'teacher', both or none.

    The signature of the loss tells, also of one's own: an option of these names that is not 0.
    """
    name, asked = config.loss.name, set[str]()
    parameters = inspect.signature(registry.resolve("loss", name)).parameters
    given = {**config.loss.model_dump(exclude_none=True), **config.loss.kwargs}
    for option, model in ASKING.items():
        default = parameters[option].default if option in parameters else 0
        if given.get(option, 0 if default is inspect.Parameter.empty else default):
            asked.add(model)
    if config.model.teacher and not _is_shipped("loss", name):
        asked.add("teacher")
    return asked


def _guarded(kind: Kind, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return call_with_timeout(f"{kind} '{name}'", function, seconds=CALL_SECONDS)


def _is_shipped(kind: Kind, name: str) -> bool:
    return name in registry.TABLES[kind]


def _options(
    kind: Kind, name: str, function: Callable[..., Any], given: Options, kwargs: Mapping[str, Any]
) -> Options:
    """What the function is called with beside its arguments."""
    for option in given:
        if option not in _takes(kind, function) and not _takes_any(function):
            raise ConfigError(
                f"{kind}.{option} is no option of {kind} '{name}'; {_homes(kind, option)}"
            )
    if _is_shipped(kind, name) and kwargs:
        raise ConfigError(
            f"{kind}.kwargs is for a function of your own; '{name}' takes "
            f"{', '.join(f'{kind}.{each}' for each in _takes(kind, function)) or 'no option'}"
        )
    if both := given.keys() & kwargs.keys():
        option = min(both)
        raise ConfigError(f"{kind}.{option} and {kind}.kwargs.{option} are one option; give one")
    options = {**given, **kwargs}
    _check_fit(kind, name, function, options)
    return options


def _takes(kind: Kind, function: Callable[..., Any]) -> list[str]:
    """The options of a function, by its signature."""
    parameters = list(inspect.signature(function).parameters.values())[POSITIONAL[kind] :]
    return [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]


def _takes_any(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(each.kind is each.VAR_KEYWORD for each in parameters)


def _homes(kind: Kind, option: str) -> str:
    homes = [
        name for name in registry.TABLES[kind]
        if option in _takes(kind, registry.resolve(kind, name))
    ]  # fmt: skip
    return f"leave it out, or choose {' or '.join(homes)} with {kind}.name"


def _check_fit(kind: Kind, name: str, function: Callable[..., Any], options: Options) -> None:
    try:
        inspect.signature(function).bind(*[None] * POSITIONAL[kind], **options)
    except TypeError as error:
        where = f"filter.custom.'{name}'.kwargs" if kind == "filter" else f"{kind}.kwargs"
        takes = ", ".join(_takes(kind, function)) or "none"
        raise ConfigError(
            f"{kind} '{name}': {error}; its options are {takes}, set them in {where}"
        ) from None


def _check_order(function: Callable[..., Any], options: Options) -> None:
    defaults = inspect.signature(function).parameters
    for low, high in ORDERED:
        if low in defaults and high in defaults:
            bounds = [options.get(each, defaults[each].default) for each in (low, high)]
            if not bounds[0] < bounds[1]:
                raise ConfigError(
                    f"loss.{low} {bounds[0]} is not below loss.{high} {bounds[1]}; "
                    "everything would be left out"
                )


def _check_effect(name: str, options: Options) -> None:
    """Refuse options that others leave without any effect."""
    if options.get("sequence_clip_high") is not None and options.get("ratio_type") != "sequence":
        raise ConfigError(
            "loss.sequence_clip_high needs loss.ratio_type sequence; give it, or leave this out"
        )
    if options.get("behav_imp_weight_cap") and not options.get("use_decoupled_loss", True):
        raise ConfigError(
            "loss.behav_imp_weight_cap has no effect with loss.use_decoupled_loss false, where "
            "every weight is 1; leave one of them out"
        )
    others = ("teacher_tau", "kl_tau", "entropy_coef")
    if name == "importance" and options.get("adv_tau") == 0 and not any(map(options.get, others)):
        raise ConfigError(
            "loss.adv_tau, loss.teacher_tau, loss.kl_tau and loss.entropy_coef are all 0, so that "
            "nothing would be learned; give one of them"
        )


def _catching(name: str, options: Options, facts: Options) -> Callable[[Rollout], bool]:
    function: Callable[..., Any] = registry.resolve("filter", name)
    known = {each: facts[each] for each in _takes("filter", function) if each in facts}
    merged = {**known, **options}
    _check_fit("filter", name, function, merged)
    if not _is_shipped("filter", name):
        function = _as_bool(name, _guarded("filter", name, function))
    return functools.partial(function, **merged)


def _finite(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The loss, which is told when it makes no number of logprobs that are numbers."""

    @functools.wraps(function)
    def call(tokens: Tokens, **options: Any) -> Any:
        found = function(tokens, **options)
        value = found[0] if isinstance(found, tuple) and found else found
        if (
            isinstance(value, torch.Tensor)
            and not bool(value.isfinite().all())
            and bool(tokens.logprobs.isfinite().all())
        ):
            raise UserCodeError(
                f"loss '{name}' gives {value.tolist()} although all logprobs are finite; mend it"
            )
        return found

    return call


def _as_floats(function: Callable[..., Any]) -> Callable[..., Any]:
    """The estimator, whose numbers may be of any library."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> list[float]:
        return [float(each) for each in function(*arguments, **options)]

    return call


def _as_bool(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(rollout: Rollout, **options: Any) -> bool:
        found = function(rollout, **options)
        if not isinstance(found, (bool, np.bool_)):
            raise UserCodeError(f"filter '{name}' gives {found!r:.80}; return True or False")
        return bool(found)

    return call
