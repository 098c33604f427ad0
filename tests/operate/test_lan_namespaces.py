"""A trainer and two generators in three network namespaces.

.venv/bin/python -m pytest -m lan tests/operate/test_lan_namespaces.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from network_namespaces import Net, network
from real_programs import RealRun, ended_within, until

pytestmark = [pytest.mark.lan, pytest.mark.timeout(200)]
CUT_SECONDS = 20.0
GENERATORS = {"ann": "10.78.1", "bob": "10.78.2"}  # name, and prefix of its network


@pytest.fixture
def net() -> Iterator[Net]:
    with network(GENERATORS) as made:
        yield made


def groups_after(run: RealRun, name: str, step: int) -> bool:
    """True if the trainer received groups of this generator after the step."""
    return any(
        float(str(row.get(f"gen/{name}/groups", 0))) > 0
        for row in run.rows if int(str(row["step"])) > step
    )  # fmt: skip


def test_generator_rejoins_after_its_link_was_cut_for_20_s(net: Net, tmp_path: Path) -> None:
    run = RealRun(tmp_path, "--wire.bind", "0.0.0.0", "--security.insecure",
                  "--train.max-steps", "100000", "--train.learning-rate", "1e-6")  # fmt: skip
    try:
        trainer = run.trainer(shell=f'exec ip netns exec {net.trainer} "$@"')
        ann, bob = (
            run.generator(name, "--wire.host", f"{there}.1",
                            shell=f'exec ip netns exec {net.namespace(name)} "$@"')
            for name, there in GENERATORS.items()
        )  # fmt: skip
        until(lambda: groups_after(run, "ann", 0) and groups_after(run, "bob", 0),
              trainer, ann, bob)  # fmt: skip
        net.set_link("bob", "down")
        cut = run.step
        assert not ended_within(trainer, CUT_SECONDS)
        alone = run.step
        assert alone > cut + 3  # the run goes on
        assert not groups_after(run, "bob", alone - 1)
        assert ann.alive and bob.alive
        net.set_link("bob", "up")
        until(lambda: groups_after(run, "bob", alone), trainer, ann, bob, seconds=40)
    finally:
        run.close()
