"""Settings from TOML files and the command line; entry points of the programs.

A setting is written `section.leaf`, such as train.learning_rate: the key `learning_rate` in the
table [train] of a TOML file, or the option --train.learning-rate.

    sections, training_sections,
    objective_sections            one pydantic model per TOML section
    schema                        `Config`: all sections, and checks across them
    load                          command line and TOML files -> Config; --help
    foreign_names                 error messages for unknown settings, with the right name
    resolved                      config.toml in the run folder, and what a resumed run may change
    hosts                         the hosts file of a run on several machines
    programs                      entry points of the console scripts and of the files in bin/

Nothing here imports torch: `--help` and configuration errors take less than half a second.
"""

from peralta_zmq.config.load import files_given, load_config
from peralta_zmq.config.resolved import (
    FITTED,
    RESOLVED,
    changed_settings,
    earlier_config,
    is_set,
    keep_fork,
    load_resolved,
    with_fitted_of_run,
    with_settings,
    write_resolved,
)
from peralta_zmq.config.schema import Config, check_memory_fractions

__all__ = [
    "FITTED",
    "RESOLVED",
    "Config",
    "changed_settings",
    "check_memory_fractions",
    "earlier_config",
    "files_given",
    "is_set",
    "keep_fork",
    "load_config",
    "load_resolved",
    "with_fitted_of_run",
    "with_settings",
    "write_resolved",
]
