"""The streaming bench: which steps are computed while their groups arrive."""

from __future__ import annotations

import pytest

from benchmarks import streaming


@pytest.mark.slow
def test_half_of_the_steps_are_computed_while_their_groups_arrive() -> None:
    early, whole = streaming.measured(4)
    assert [step.overlapped > 0 for step in (*early, *whole)] == [True, True, False, False]
