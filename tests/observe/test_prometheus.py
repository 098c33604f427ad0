"""Documented metric names, and the Prometheus text format."""

import math
import re
from pathlib import Path

import pytest

from peralta_zmq.observe.metrics import Row
from peralta_zmq.observe.prometheus import SECTIONS, documented_name, exposition

parser = pytest.importorskip("prometheus_client.parser", reason="make setup installs it")

ROW: Row = {
    "step": 12, "reward": 0.71, "time/publish": 1e-5, "grad_norm": None, "dropped/stale": 3,
    "gen/local-0/tokens_per_s": 410.5, "gen/local-1/tokens_per_s": 80,
    "rewards/format/mean": 0.5, "loss": math.nan, "kl": math.inf, "my.own": -1.5,
    "note": "text",
}  # fmt: skip
TEXT = """\
# HELP peralta_step training steps taken
# TYPE peralta_step gauge
peralta_step{run="demo"} 12.0
peralta_step{run="other"} 2.0
# HELP peralta_reward mean reward of all rollouts in the batch
# TYPE peralta_reward gauge
peralta_reward{run="demo"} 0.71
# HELP peralta_time_publish seconds for which publishing blocked the step
# TYPE peralta_time_publish gauge
peralta_time_publish{run="demo"} 1e-05
# HELP peralta_dropped_stale_total groups dropped so far because of train.max_off_policy_steps
# TYPE peralta_dropped_stale_total counter
peralta_dropped_stale_total{run="demo"} 3.0
# HELP peralta_gen_tokens_per_s generated tokens per second
# TYPE peralta_gen_tokens_per_s gauge
peralta_gen_tokens_per_s{run="demo",generator="local-0"} 410.5
peralta_gen_tokens_per_s{run="demo",generator="local-1"} 80.0
# HELP peralta_rewards_mean unweighted mean of a reward function, a named term, or one of several environments
# TYPE peralta_rewards_mean gauge
peralta_rewards_mean{run="demo",reward="format"} 0.5
# HELP peralta_my_own a metric added by the loss
# TYPE peralta_my_own gauge
peralta_my_own{run="demo"} -1.5
# HELP peralta_its_own a metric added by the loss
# TYPE peralta_its_own gauge
peralta_its_own{run="other"} 3.0
"""  # noqa: E501


def test_exposition_is_valid_and_has_every_finite_number() -> None:
    text = exposition({"demo": ROW, "other": {"step": 2, "its.own": 3.0}})
    assert text == TEXT
    families = list(parser.text_string_to_metric_families(text))
    assert sum(len(family.samples) for family in families) == 10


@pytest.mark.parametrize("hostile", ['a"} 1\nb{c="', "back\\slash", "new\nline", "\\n", "é/x/y"])
def test_hostile_name_stays_one_label(hostile: str) -> None:
    text = exposition({hostile: {f"gen/{hostile}/tokens_per_s": 1.0}})
    assert len(text.splitlines()) == 3
    (family,) = parser.text_string_to_metric_families(text)
    (sample,) = family.samples
    assert sample.labels == {"run": hostile, "generator": hostile}


def test_control_characters_are_escaped() -> None:
    text = exposition({"r": {"gen/a\x1b[2J/tokens_per_s": 1.0}})
    assert r'generator="a\\x1b[2J"' in text and "\x1b" not in text


def test_illegal_characters_are_replaced_and_equal_names_yield_one_sample() -> None:
    lines = exposition({"r": {"été/9 lives{}": 1.0}}).splitlines()
    assert re.fullmatch(r'peralta_[a-zA-Z0-9_]+\{run="r"\} 1\.0', lines[-1])
    text = exposition({"r": {"time/publish": 1.0, "time_publish": 2.0}})
    assert text.count('peralta_time_publish{run="r"}') == text.count("# TYPE") == 1


def test_metrics_page_lists_every_metric_of_every_section() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text("utf-8")
    for section, names in SECTIONS.items():
        rows = "".join(f"- `{name}`: {meaning}\n" for name, meaning in names.items())
        assert f"## {section}\n\n{rows}\n" in page


def test_documented_name_of_a_metric() -> None:
    assert documented_name("rewards/a/b/mean") == "rewards/NAME/mean"
    assert documented_name("filter/taken_out") == "filter/taken_out"
    assert documented_name("filter/overlong") == "filter/NAME"
    for key in ("rewards", "gen/a/mood", "reward_", "rewards//mean"):
        assert documented_name(key) is None
