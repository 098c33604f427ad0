"""docs/metrics.md lists exactly the metrics of metric_names."""

from pathlib import Path

import pytest

from peralta_zmq.observe.metric_names import SECTIONS, markdown, meaning_of

pytestmark = pytest.mark.timeout(20)


def test_document_contains_the_generated_tables() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text("utf-8")
    assert markdown() in text, "paste the output of markdown() into docs/metrics.md"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("reward", "reward"), ("rewards/a/b/mean", "rewards/NAME/mean"),
        ("filter/taken_out", "filter/taken_out"), ("filter/overlong", "filter/NAME"),
        ("gen/local-0/tokens_per_s", "gen/NAME/tokens_per_s"),
    ],
)  # fmt: skip
def test_meaning_of_finds_the_documented_name(key: str, name: str) -> None:
    meaning = next(names[name] for names in SECTIONS.values() if name in names)
    assert meaning_of(key) == (name, meaning)


@pytest.mark.parametrize("key", ["rewards", "gen/a/mood", "my_own", "reward_", "rewards//mean"])
def test_meaning_of_unknown_key_is_none(key: str) -> None:
    assert meaning_of(key) is None
