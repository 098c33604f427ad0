"""The verifier of the environments' tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from peralta_zmq.environments.verifier_service import Verifier


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    """Shared by the tests that only send requests."""
    from verifier_servers import serving

    from peralta_zmq.config import load_config

    with serving(load_config("bin/verifier", [])) as verifier:
        yield verifier
