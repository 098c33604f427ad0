"""What a run computes with: the model and the reward. Knows the config, and no machine."""

from __future__ import annotations

import time
from contextlib import closing, suppress

from peralta_zmq.config import Config
from peralta_zmq.errors import ConfigError
from peralta_zmq.operate.doctor.check import Check


def check_model(config: Config) -> Check:
    """The trainer's model loads with no network. Raises ConfigError when it does not."""
    from peralta_zmq import models

    started, folder = time.monotonic(), models.model_folder(config.model.name)
    tokenizer = models.load_tokenizer(folder)
    model = models.load_model(
        folder, device=models.choose_device(config.model.device), dtype=models.DTYPES["float32"]
    )
    millions = model.num_parameters() / 1e6
    seconds = time.monotonic() - started
    return Check("model", True, f"{config.model.name}: {millions:.1f} M parameters, "
                 f"{len(tokenizer)} tokens, loaded offline in {seconds:.1f} s")  # fmt: skip


def check_reward(config: Config) -> Check:
    """Every environment opens, and its reward judges one answer, the right one.

    Raises ConfigError or TaskError when one does not.
    """
    from peralta_zmq.build import open_environments

    told: list[str] = []
    with closing(open_environments(config, "train")) as environments:
        for name, size in environments.sizes.items():
            problem = next(each for each in environments.problems if each.task == name)
            environments.reward(problem, problem.answer)  # starts what judges
            started = time.monotonic()
            earned = environments.reward(problem, problem.answer)
            seconds = time.monotonic() - started
            worth = sum(earned.values()) if isinstance(earned, dict) else earned
            told.append(f"{name}: {size} problems, the answer {problem.answer[:20]!r} earns "
                        f"{worth:g} in {1e3 * seconds:.1f} ms")  # fmt: skip
    return Check("reward", True, "; ".join(told))


def model_bytes(config: Config) -> int | None:
    """Bytes of a published model, when the model lies on this machine."""
    from peralta_zmq import models
    from peralta_zmq.operate.doctor.weights import model_bytes_of

    with suppress(ConfigError, OSError, ValueError):
        return model_bytes_of(models.model_folder(config.model.name), dtype=config.weights.dtype)
    return None


def facts(config: Config) -> dict[str, str]:
    """What computes here; nothing when the device is not there."""
    from peralta_zmq import models

    with suppress(ConfigError):
        device = models.choose_device(config.model.device)
        return models.worker_info(device, models.choose_dtype(device, config.model.dtype)[0])
    return {}
