"""The names of metrics and docs/metrics.md say the same."""

from pathlib import Path

import pytest

from peralta_zmq.observe.metric_names import SECTIONS, meaning_of, table

pytestmark = pytest.mark.timeout(20)


def test_the_document_has_every_name_and_no_other() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text("utf-8")
    assert table() in text, "put what table() gives there"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("reward", "reward"), ("rewards/a/b/mean", "rewards/NAME/mean"),
        ("filter/taken_out", "filter/taken_out"), ("filter/overlong", "filter/NAME"),
        ("gen/local-0/tokens_per_s", "gen/NAME/tokens_per_s"),
    ],
)  # fmt: skip
def test_a_key_is_found_by_its_documented_name(key: str, name: str) -> None:
    found = meaning_of(key)
    assert found is not None
    assert found == (name, next(each[name] for each in SECTIONS.values() if name in each))


@pytest.mark.parametrize("key", ["rewards", "gen/a/mood", "my_own", "reward_", "rewards//mean"])
def test_a_key_of_nobody_is_not_found(key: str) -> None:
    assert meaning_of(key) is None
