"""The dashboard beside the training: opened if it can be, and never a reason to stop.

Knows the settings and the run's books; knows nothing of what the page shows.
"""

from __future__ import annotations

from contextlib import ExitStack, closing

from peralta_zmq.atomic_files import read_private_token
from peralta_zmq.config import Config
from peralta_zmq.errors import ConfigError
from peralta_zmq.observe.dashboard.server import Dashboard
from peralta_zmq.observe.run_log import RunLog


def show(config: Config, stack: ExitStack, books: RunLog) -> None:
    """Answer in a daemon thread until `stack` is left; without a page we train all the same."""
    chosen = config.dashboard
    if not chosen.enabled:
        return
    try:
        token = read_private_token(chosen.token_file, option="dashboard.token_file")
        page = Dashboard(
            [config.run_folder], host=chosen.host, port=chosen.port, token=token, live=True
        )
        stack.enter_context(closing(page))
        page.start()
    except ConfigError as error:
        books.note(f"no page: {error}")
        return
    except Exception as error:  # noqa: BLE001 - whatever it is, it is no reason not to train
        books.note(f"no page: {error!r}")
        return
    for line in page.greeting:
        books.note(line)
