"""A row as Prometheus reads it: by its own parser, and letter by letter."""

import math
import re

import pytest

from peralta_zmq.observe.metrics import Row
from peralta_zmq.observe.prometheus import exposition

parser = pytest.importorskip("prometheus_client.parser", reason="make setup installs it")
pytestmark = pytest.mark.timeout(20)

ROW: Row = {
    "step": 12, "reward": 0.71, "time/publish": 1e-5, "grad_norm": None, "dropped/stale": 3,
    "gen/local-0/tokens_per_s": 410.5, "gen/local-1/tokens_per_s": 80,
    "rewards/format/mean": 0.5, "loss": math.nan, "kl": math.inf, "my.own": -math.inf,
    "note": "text", "skipped": True,
}  # fmt: skip
TEXT = """\
# HELP peralta_step optimizer steps taken
# TYPE peralta_step gauge
peralta_step{run="demo"} 12.0
# HELP peralta_reward mean reward of all rollouts that the step took
# TYPE peralta_reward gauge
peralta_reward{run="demo"} 0.71
# HELP peralta_time_publish seconds for which publishing held the step up
# TYPE peralta_time_publish gauge
peralta_time_publish{run="demo"} 1e-05
# HELP peralta_dropped_stale_total groups dropped so far for being older than train.max_off_policy_steps
# TYPE peralta_dropped_stale_total counter
peralta_dropped_stale_total{run="demo"} 3.0
# HELP peralta_gen_tokens_per_s tokens it generates in a second
# TYPE peralta_gen_tokens_per_s gauge
peralta_gen_tokens_per_s{run="demo",generator="local-0"} 410.5
peralta_gen_tokens_per_s{run="demo",generator="local-1"} 80.0
# HELP peralta_rewards_mean mean of a part of the reward, or of an environment's rewards when there are several
# TYPE peralta_rewards_mean gauge
peralta_rewards_mean{run="demo",reward="format"} 0.5
# HELP peralta_loss what the step made smaller; near 0 without meaning anything for some losses
# TYPE peralta_loss gauge
peralta_loss{run="demo"} NaN
# HELP peralta_kl mean distance (k3) to the reference
# TYPE peralta_kl gauge
peralta_kl{run="demo"} +Inf
# HELP peralta_my_own a metric of the loss's own
# TYPE peralta_my_own gauge
peralta_my_own{run="demo"} -Inf
"""  # noqa: E501


def samples(text: str) -> dict[tuple[str, str], float]:
    """What Prometheus' own parser reads: (name, the last label) -> value."""
    return {
        (sample.name, list(sample.labels.values())[-1]): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_row_is_written_letter_by_letter() -> None:
    assert exposition({"demo": ROW}) == TEXT


def test_prometheus_reads_back_every_number() -> None:
    read = samples(exposition({"demo": ROW}))
    assert math.isnan(read.pop(("peralta_loss", "demo")))
    assert read == {
        ("peralta_step", "demo"): 12, ("peralta_reward", "demo"): 0.71,
        ("peralta_time_publish", "demo"): 1e-5, ("peralta_dropped_stale_total", "demo"): 3,
        ("peralta_gen_tokens_per_s", "local-0"): 410.5,
        ("peralta_gen_tokens_per_s", "local-1"): 80,
        ("peralta_rewards_mean", "format"): 0.5, ("peralta_kl", "demo"): math.inf,
        ("peralta_my_own", "demo"): -math.inf,
    }  # fmt: skip


@pytest.mark.parametrize("hostile", ['a"} 1\nb{c="', "back\\slash", "new\nline", "\\n", "é/x/y"])
def test_a_hostile_name_stays_one_label(hostile: str) -> None:
    text = exposition({hostile: {f"gen/{hostile}/tokens_per_s": 1.0}})
    assert len(text.splitlines()) == 3
    (family,) = parser.text_string_to_metric_families(text)
    (sample,) = family.samples
    assert sample.labels == {"run": hostile, "generator": hostile}


def test_a_strange_name_becomes_a_lawful_one() -> None:
    lines = exposition({"r": {"été/9 lives{}": 1.0}}).splitlines()
    assert re.fullmatch(r'peralta_[a-zA-Z0-9_]+\{run="r"\} 1\.0', lines[-1])


def test_no_sample_is_told_twice() -> None:
    text = exposition({"r": {"time/publish": 1.0, "time_publish": 2.0}})
    assert text.count('peralta_time_publish{run="r"}') == text.count("# TYPE") == 1


def test_an_empty_row_is_no_text() -> None:
    assert exposition({"r": {}}) == ""


def test_two_runs_share_the_head_of_a_metric() -> None:
    assert exposition({"a": {"step": 1}, "b": {"step": 2, "my.own": 3.0}}).splitlines() == [
        "# HELP peralta_step optimizer steps taken",
        "# TYPE peralta_step gauge",
        'peralta_step{run="a"} 1.0',
        'peralta_step{run="b"} 2.0',
        "# HELP peralta_my_own a metric of the loss's own",
        "# TYPE peralta_my_own gauge",
        'peralta_my_own{run="b"} 3.0',
    ]
