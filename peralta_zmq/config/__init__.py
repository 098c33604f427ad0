"""Every knob, read by both programs from the same files, and how a door starts.

    sections   the knobs: default, bounds and one line of meaning each; environments and objective
               are apart
    settings   all of them together, and what they must be together
    names      foreign and misspelt names, answered with the right one
    help       the text of --help; document, the same as docs/config.md
    load       command line and TOML to a Config; errors become one line
    resolved   the settings a run was made with, kept in its folder

Knows nothing of models, sockets or rewards; never imports torch.
"""

from peralta_zmq.config.load import files_given, load_config, run_plain_program, run_program
from peralta_zmq.config.resolved import RESOLVED, earlier_config, toml_text, write_resolved
from peralta_zmq.config.settings import Config

__all__ = [
    "RESOLVED",
    "Config",
    "earlier_config",
    "files_given",
    "load_config",
    "run_plain_program",
    "run_program",
    "toml_text",
    "write_resolved",
]
