"""Start a program of this checkout with its own Python; every file in bin/ calls it.

This file uses old syntax only: a Python that is too old must be able to report that it is too old.
"""

import importlib
import os
import signal
import sys

BIN = os.path.dirname(os.path.abspath(__file__))
REPO = os.path.dirname(BIN)


def launch(entry_point, die_on_interrupt=False):
    """Run "module:function" and exit with its result.

    The checkout's .venv replaces any other Python that started us. With `die_on_interrupt`, Ctrl-C
    ends the process through the kernel until the program installs a handler: a KeyboardInterrupt
    could be swallowed by a library that is being imported.
    """
    if die_on_interrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    environment = os.path.join(REPO, ".venv")
    python = os.path.join(environment, "bin", "python")
    if os.path.exists(python) and os.path.realpath(sys.prefix) != os.path.realpath(environment):
        os.execv(python, [python] + sys.argv)  # noqa: RUF005
    if sys.version_info < (3, 11):  # noqa: UP036  (an old Python runs this line)
        name = os.path.basename(sys.argv[0])
        sys.exit(
            "bin/%s: error: %s is older than Python 3.11; use a newer one" % (name, sys.executable)  # noqa: UP031
        )
    for file in os.listdir(REPO):
        if file.endswith(".py") and file[:-3] in sys.stdlib_module_names:
            path, name = os.path.join(REPO, file), os.path.basename(sys.argv[0])
            sys.exit("bin/%s: error: %s hides a module of Python; rename it" % (name, path))  # noqa: UP031
    sys.path[:] = [REPO] + [path for path in sys.path if path != BIN]
    module, function = entry_point.split(":")
    sys.exit(getattr(importlib.import_module(module), function)())
