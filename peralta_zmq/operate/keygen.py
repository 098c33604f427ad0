"""`bin/doctor keygen`: keys for the trainer and for one generator, and what to copy where.

Knows the config and what a person is told; knows nothing of cryptography.
"""

from __future__ import annotations

import sys

from peralta_zmq.config import Config
from peralta_zmq.errors import ConfigError


def main(config: Config) -> None:
    """Make the keys that are missing. Raises ConfigError, or WireError for a key file."""
    from peralta_zmq.wire import auth

    folder, name = config.keys_folder, config.generator.name
    if folder is None:
        raise ConfigError("keygen: where to? --security.keys DIR")
    if name == auth.TRAINER:
        raise ConfigError(f"generator.name {name!r} is the trainer's; choose another")
    for each in filter(None, (auth.TRAINER, name)):
        made = auth.make_keys(folder, each)
        sys.stdout.write(f"{each}: {'made' if made else 'kept'} in {folder}\n")
    if name is None:
        sys.stdout.write("for a generator: the same with --generator.name NAME\n")
        return
    sys.stdout.write(
        f"copy {auth.TRAINER}{auth.PUBLIC} and {name}{auth.SECRET} to {folder} on its machine "
        f"(chmod 600 {name}{auth.SECRET}), start it there with --generator.name {name},\n"
        f"and leave {name}{auth.PUBLIC} and {auth.TRAINER}{auth.SECRET} here, with the trainer\n"
    )
