"""The dashboard in a browser. `make test-browser`."""

from __future__ import annotations

import json
import operator
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic_runs import append, group, make_run, row

from peralta_zmq.observe.dashboard.view import write_report
from peralta_zmq.observe.metrics import read_rows

ROOT = Path(__file__).parents[2]
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script> \ud800 </script>'


def test_numbers_equal_those_of_the_files(tmp_path: Path, serve: Callable, tab: Callable) -> None:
    folder = make_run(tmp_path / "hand", num_steps=30)
    append(folder / "eval.jsonl", {"step": 0, "accuracy": 0.424}, {"step": 20, "accuracy": 0.875})
    last = read_rows(folder / "metrics.jsonl")[-1]
    seen = tab(serve(folder).url)
    seen.wait_for("card-reward", f"{last['reward']:.3f}")
    shown = {name: seen.text(f"card-{name}") for name in
             ("eval", "rollouts", "wait", "queue", "staleness", "dropped",
              "generators")}  # fmt: skip
    # 128 rollouts of 9.5 generated tokens in 0.4 s, half of which is waiting
    assert shown == {"eval": "0.875", "rollouts": "320", "wait": "50%", "queue": "14",
                     "staleness": "1.2", "dropped": "3", "generators": "2"}  # fmt: skip
    assert seen.text("note-rollouts") == "3,040 generated tokens/s"
    assert (seen.text("run"), seen.text("about")) == ("hand", "embedded \u00b7 calculator")
    assert (seen.text("step"), seen.text("max-steps")) == ("30", "60")
    assert seen.text("status") == "training"
    assert seen.text("eta") == "12s left"  # 30 steps of 0.4 s
    assert seen.text("generator-ann").split("\t") == [
        "ann", "up", "29", "1", "1,045", "15%", "0.012 s", "8"]  # fmt: skip
    assert seen.text("generator-bob-tokens_per_s") == "1,045"
    assert seen.text("generator-bob-state") == "up"
    assert seen.text("reward-reward") == f"{last['reward']:.3g}"
    assert seen.text("weights-weights/seconds") == "0.03"
    assert seen.text("verdict").startswith("the trainer waits 50% of its time for rollouts")
    assert seen.chart("reward", "data-points") == "31"  # 30 steps and the evaluation at 0
    assert seen.page.locator("article.chart[data-drawn]").count() == 11


def test_new_row_appears_within_two_seconds(tmp_path: Path, serve: Callable, tab: Callable) -> None:
    folder = make_run(tmp_path / "hand", num_steps=5)
    seen = tab(serve(folder).url)
    seen.wait_for("step", "5")
    append(folder / "metrics.jsonl", row(6, reward=0.125))
    seen.wait_for("card-reward", "0.125", seconds=2.0)
    assert seen.chart("reward", "data-points") == "6"
    append(folder / "samples.jsonl", group(6, "newest", "other"))
    seen.page.get_by_text("newest", exact=True).wait_for()


def test_restarted_server_sends_no_point_twice(
    tmp_path: Path, serve: Callable, tab: Callable
) -> None:
    folder = make_run(tmp_path / "hand", num_steps=5)
    server = serve(folder)
    seen = tab(server.url, lost=True)
    seen.wait_for("step", "5")
    server.kill()
    seen.wait_for("status", "reconnecting")
    assert "bin/dashboard" in seen.text("note")
    assert seen.text("card-queue") == "14"  # the last data stays visible
    assert seen.text("generator-ann").split("\t")[1] == "unknown"
    assert seen.text("card-generators") == "-"
    append(folder / "metrics.jsonl", row(6), row(7))
    server.start()
    seen.wait_for("step", "7")
    seen.wait_for("status", "training")
    assert seen.chart("reward", "data-points") == "7"
    assert seen.chart("reward", "data-last-step") == "7"
    assert seen.text("generator-ann").split("\t")[1] == "up"


def test_run_started_again_replaces_the_earlier_one(
    tmp_path: Path, serve: Callable, tab: Callable
) -> None:
    folder = make_run(tmp_path / "hand", num_steps=5)
    append(folder / "samples.jsonl", group(5, "earlier", "other"))
    append(folder / "events.jsonl", {"time": time.time(), "event": "restart"})
    seen = tab(serve(folder).url)
    seen.wait_for("step", "5")
    seen.page.get_by_text("earlier", exact=True).wait_for()
    shutil.rmtree(folder)
    make_run(folder, num_steps=2)
    seen.wait_for("step", "2")
    seen.page.get_by_text("3 + 4", exact=True).wait_for()
    assert seen.page.locator("#older").is_disabled()  # there is only one group
    assert seen.page.locator("#events li").count() == 3
    assert seen.chart("reward", "data-points") == "2"


def test_empty_run_explains_what_it_waits_for(
    tmp_path: Path, serve: Callable, tab: Callable
) -> None:
    folder = make_run(tmp_path / "hand", num_steps=0)
    seen = tab(serve(folder).url)
    seen.wait_for("status", "waiting for a generator")
    assert seen.text("verdict") == "waiting for the first generator"
    assert seen.text("advice") == "start one: bin/generator @ CONFIG"
    assert seen.text("card-reward") == "-"
    assert [seen.text(f"note-{name}") for name in ("rollouts", "wait", "staleness")] == (
        3 * ["no step yet"]
    )
    assert "NaN" not in seen.page.locator("body").inner_text()
    append(folder / "metrics.jsonl", row(1))
    seen.wait_for("step", "1")


def test_ten_thousand_steps_are_drawn_soon(tmp_path: Path, serve: Callable, tab: Callable) -> None:
    """Within a second, or what a page of ten steps and eight times the parsing of the file take."""
    short = make_run(tmp_path / "short", num_steps=10)
    folder = make_run(tmp_path / "hand", num_steps=10_000)
    limits: list[float] = []  # milliseconds, measured in turns because the load may change
    times: list[float] = []
    while len(times) < 6 and not any(map(operator.le, times, limits)):
        started = time.perf_counter()
        for line in (folder / "metrics.jsonl").read_bytes().splitlines():
            json.loads(line)
        parsing = 1000 * (time.perf_counter() - started)
        limits.append(max(1000.0, milliseconds_to_draw(short, "10", serve, tab) + 8 * parsing))
        times.append(milliseconds_to_draw(folder, "10,000", serve, tab))
    print("10,000 steps are drawn after", times, "ms; limits", limits)
    assert any(map(operator.le, times, limits))


def milliseconds_to_draw(folder: Path, step: str, serve: Callable, tab: Callable) -> float:
    """Time from the navigation until all charts of a run with this newest step are drawn."""
    server = serve(folder)  # a new one, which has read nothing yet
    seen = tab("about:blank")
    seen.origin = server.url
    seen.page.goto(server.url, wait_until="commit")
    duration = seen.page.evaluate(
        """async (step) => {
        const done = () => document.querySelectorAll("article.chart[data-drawn]").length === 11
            && document.querySelector('[data-testid="step"]').textContent === step;
        while (!done()) await new Promise(requestAnimationFrame);
        return performance.now();
    }""",
        step,
    )
    assert int(seen.chart("reward", "data-points")) < 2000
    seen.page.goto("about:blank")
    server.kill()
    return duration


def test_text_of_a_model_is_never_markup(tmp_path: Path, serve: Callable, tab: Callable) -> None:
    folder = make_run(tmp_path / "hand", num_steps=3)
    append(folder / "samples.jsonl", group(3, HOSTILE, "x" * 100_000, "b"))
    append(folder / "events.jsonl", {"time": time.time(), "event": "skip", "reason": HOSTILE})
    append(folder / "metrics.jsonl", {**row(4), "gen/<b onclick=x>/tokens_per_s": 1.0})
    seen = tab(serve(folder).url)
    seen.wait_for("step", "4")
    first = seen.page.get_by_test_id("completion").first
    first.get_by_text("window.hacked").wait_for()
    text = first.inner_text()
    assert text.startswith(HOSTILE.partition("\ud800")[0]) and text.endswith(" </script>")
    assert seen.page.get_by_test_id("completion").nth(1).inner_text().endswith(" more characters)")
    assert seen.page.evaluate("window.hacked") is None
    assert seen.page.locator("main img, main b[onclick]").count() == 0
    assert "<img src=x" in seen.text("events")


def test_sample_shows_rewards_and_can_be_paused(
    tmp_path: Path, serve: Callable, tab: Callable
) -> None:
    folder = make_run(tmp_path / "hand", num_steps=3)
    seen = tab(serve(folder).url)
    seen.wait_for("step", "3")
    seen.page.get_by_test_id("rollout").first.wait_for()
    assert seen.text("prompt") == "add 3 to 4"
    first = seen.page.get_by_test_id("rollout").first.inner_text()
    assert first.split() == ["reward", "1.00", "advantage", "+0.75", "3", "+", "4"]
    texts = [seen.page.get_by_test_id(name).all_inner_texts() for name in ("reward", "advantage")]
    assert texts == [["reward 1.00", *3 * ["reward 0.00"]],
                    ["advantage +0.75", *3 * ["advantage -0.25"]]]  # fmt: skip
    seen.page.get_by_test_id("pause").click()
    append(folder / "samples.jsonl", group(4, "later", "still later"))
    append(folder / "metrics.jsonl", row(4))
    seen.wait_for("step", "4")
    assert "later" not in seen.text("sample")
    seen.page.get_by_test_id("pause").click()
    seen.page.get_by_text("still later").wait_for()


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_theme_follows_the_system(
    tmp_path: Path, serve: Callable, tab: Callable, *, scheme: str, dark: bool
) -> None:
    folder = make_run(tmp_path / "hand", num_steps=3)
    seen = tab(serve(folder).url, color_scheme=scheme)
    seen.wait_for("step", "3")
    brightness = """() => getComputedStyle(document.body).backgroundColor.match(/[\\d.]+/g)
        .slice(0, 3).reduce((sum, part) => sum + Number(part), 0)"""
    assert (seen.page.evaluate(brightness) < 150) == dark
    for _ in range(1 if dark else 2):  # auto -> light -> dark
        seen.page.get_by_test_id("theme").click()
    assert (seen.page.evaluate(brightness) < 150) == (not dark)


def test_phone_layout_has_no_horizontal_scrolling(
    tmp_path: Path, serve: Callable, tab: Callable
) -> None:
    folder = make_run(tmp_path / "hand", num_steps=30)
    make_run(tmp_path / ("a-long-name" * 5), num_steps=3)
    example = {"step": 0, "question": "x" * 200, "expected": "y" * 200, "completions": ["z" * 200],
               "rewards": [1.0], "cut_off": [True]}  # fmt: skip
    append(folder / "answers.jsonl", example)
    append(folder / "eval.jsonl", {"step": 0, "accuracy": 1.0})
    url = serve(tmp_path).url
    seen = tab(url, viewport={"width": 390, "height": 844})
    seen.page.get_by_test_id("run-hand").wait_for()
    assert seen.page.evaluate("document.documentElement.scrollWidth") == 390
    seen.page.get_by_role("link", name="hand").click()
    seen.wait_for("num-answers", "1 of 1 problems")
    assert seen.page.evaluate("document.documentElement.scrollWidth") == 390
    charts = seen.page.locator("article.chart").all()
    assert {round(chart.bounding_box()["width"]) for chart in charts} == {362}  # one column


def test_charts_and_controls_work_with_the_keyboard(
    tmp_path: Path, serve: Callable, tab: Callable
) -> None:
    folder = make_run(tmp_path / "hand", num_steps=30)
    seen = tab(serve(folder).url)
    seen.wait_for("step", "30")
    seen.page.keyboard.press("Tab")
    assert seen.page.evaluate("document.activeElement.className") == "skip"
    seen.page.get_by_test_id("chart-loss").focus()
    seen.page.keyboard.press("Home")
    for name in ("loss", "reward"):  # the cursor is shared
        assert seen.page.get_by_test_id(f"chart-{name}").locator(".at").inner_text() == (
            "step 1 \u00b7 join step=1 generator=ann \u00b7 join step=1 generator=bob"
        )
    seen.page.keyboard.press("ArrowRight")
    rewards = [row["reward"] for row in read_rows(folder / "metrics.jsonl")]
    assert seen.text("reward-reward") == f"{rewards[1]:.3g}"
    seen.page.keyboard.press("Escape")
    assert seen.text("reward-reward") == f"{rewards[-1]:.3g}"
    seen.page.get_by_test_id("pause").focus()
    seen.page.keyboard.press("Enter")
    assert seen.page.get_by_test_id("pause").get_attribute("aria-pressed") == "true"


def test_reduced_motion_disables_animations(tmp_path: Path, serve: Callable, tab: Callable) -> None:
    seen = tab(serve(make_run(tmp_path / "hand", num_steps=3)).url, reduced_motion="reduce")
    seen.wait_for("status", "training")
    moves = "getComputedStyle(document.getElementById('pill'), '::before').animationName"
    assert seen.page.evaluate(moves) == "none"


def test_exported_file_shows_the_same_numbers(
    tmp_path: Path, serve: Callable, tab: Callable
) -> None:
    folder = make_run(tmp_path / "hand", num_steps=30)
    append(folder / "samples.jsonl", group(30, HOSTILE, "b"))
    file = tmp_path / "report.html"
    command = [sys.executable, str(ROOT / "bin" / "dashboard"), str(folder), "--export", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    live, exported = tab(serve(folder).url), tab(file.as_uri())
    live.wait_for("step", "30")
    exported.wait_for("step", "30")
    numbers = """() => [...document.querySelectorAll(
        "[data-testid^=card], [data-testid^=note-], .legend b, #generators td")]
        .map(node => node.textContent)"""
    live.page.get_by_test_id("rollout").first.wait_for()
    assert len(live.page.evaluate(numbers)) > 40
    assert exported.page.evaluate(numbers) == live.page.evaluate(numbers)
    assert exported.text("sample") == live.text("sample")
    assert exported.page.evaluate("window.hacked") is None
    assert len(exported.requests) == 1


def test_two_runs_share_the_charts(tmp_path: Path, serve: Callable, tab: Callable) -> None:
    folders = [make_run(tmp_path / name, num_steps=count) for name, count in
               (("first", 30), ("second", 20))]  # fmt: skip
    for folder in folders:
        append(folder / "eval.jsonl", {"step": 0, "accuracy": 0.424})
    url = serve(*folders).url
    seen = tab(url)
    for name in ("first", "second"):
        seen.page.get_by_label(f"compare {name}").check()
    seen.page.get_by_test_id("compare").click()
    seen.wait_for("run", "first")
    assert seen.page.url == f"{url}?run=first&run=second"
    legend = seen.page.get_by_test_id("chart-queue").locator(".legend")
    legend.get_by_text("second queue").wait_for()
    assert legend.inner_text().split() == ["first", "queue", "14", "second", "queue", "14"]
    held_out = seen.page.get_by_test_id("chart-reward").locator(".key.dots")
    assert [key.get_attribute("class").split() for key in held_out.all()] == 2 * [["key", "dots"]]
    seen.page.get_by_role("button", name="second").click()
    seen.wait_for("step", "20")
    legend.get_by_text("second queue").wait_for()
    rows = seen.page.get_by_test_id("settings").locator("tr")
    rows.first.wait_for()
    assert rows.all_inner_texts() == ["setting\tfirst\tsecond", "train.max_steps\t60\t40"]
    assert seen.text("settings-title") == "Settings that differ"
    seen.page.get_by_role("link", name="all runs").click()
    seen.page.get_by_test_id("list").get_by_role("link", name="second").wait_for()


def test_list_links_to_the_page_of_each_run(tmp_path: Path, serve: Callable, tab: Callable) -> None:
    for name, steps in (("first", 3), ("a & b", 7)):
        make_run(tmp_path / name, num_steps=steps)
    seen = tab(serve(tmp_path).url)
    seen.page.get_by_test_id("run-first").wait_for()
    shown = seen.page.get_by_test_id("run-a & b").inner_text().split("\t")
    assert [text.strip() for text in shown[1:8]] == [
        "a & b", "training", "7 of 14", "0.556", "-", "embedded", "calculator"]  # fmt: skip
    assert not seen.page.get_by_test_id("verdict").is_visible()
    make_run(tmp_path / "third", num_steps=1)
    seen.page.get_by_test_id("run-third").wait_for()
    seen.page.get_by_role("link", name="a & b").click()
    seen.wait_for("step", "7")
    assert seen.text("run") == "a & b"
    assert not seen.page.get_by_test_id("list").is_visible()


def test_every_group_can_be_reached_also_without_signal(
    tmp_path: Path, serve: Callable, tab: Callable
) -> None:
    folder = make_run(tmp_path / "hand", num_steps=3)
    for step in range(4, 34):
        equal = {"rewards": [0.0, 0.0], "advantages": [], "outcome": "no_signal"}
        cut = {"cut_off": [False, True]}
        append(folder / "samples.jsonl", group(step, f"first of {step}", "b") | equal | cut)
    seen = tab(serve(folder).url)
    sample = seen.page.get_by_test_id("sample")
    sample.get_by_text("first of 33").wait_for()
    assert "outcome no signal" in seen.text("sample")
    assert sample.get_by_test_id("cut-off").all_inner_texts() == ["cut off at the length limit"]
    seen.page.get_by_label("from step").fill("5")
    seen.page.keyboard.press("Enter")
    sample.get_by_text("first of 5").wait_for()
    seen.page.get_by_label("rewards").select_option("mixed")
    seen.page.get_by_label("Older group").click()
    sample.get_by_text("3 4 +").wait_for()  # the group of step 3
    seen.page.get_by_label("rewards").select_option("equal")
    sample.get_by_text("first of 4").wait_for()
    seen.page.get_by_label("Newer group").click()
    sample.get_by_text("first of 5").wait_for()
    seen.page.get_by_test_id("pause").click()  # follow again
    sample.get_by_text("first of 33").wait_for()


def test_held_out_answers_can_be_read_by_evaluation(
    tmp_path: Path, serve: Callable, tab: Callable
) -> None:
    folder = make_run(tmp_path / "hand", num_steps=30)
    for step, right in ((0, 1), (20, 2)):
        for number in range(3):
            is_right = number < right
            append(folder / "answers.jsonl", {
                "step": step, "question": f"question {number}", "expected": "42",
                "completions": ["42" if is_right else HOSTILE], "rewards": [float(is_right)],
                "cut_off": [not is_right],
            })  # fmt: skip
        evaluation = {"step": step, "accuracy": right / 3, "stderr": 0.333, "num_examples": 3}
        append(folder / "eval.jsonl", evaluation)
    file = write_report([folder], tmp_path / "report.html")
    for url in (serve(folder).url, file.as_uri()):
        seen = tab(url)
        seen.wait_for("num-answers", "3 of 3 problems")
        assert seen.text("note-eval") == "± 0.333, n = 3; step 20; 0.333 at 0"
        examples = seen.page.get_by_test_id("example")
        assert examples.nth(1).inner_text().split() == [
            "question", "question", "1", "expected", "42", "reward", "1.00", "42"]  # fmt: skip
        seen.page.get_by_test_id("by-score").select_option("wrong")
        seen.wait_for("num-answers", "1 of 3 problems")
        assert examples.get_by_test_id("cut-off").count() == 1
        seen.page.get_by_test_id("evaluation").select_option("0")
        seen.wait_for("num-answers", "2 of 3 problems")
        assert seen.page.evaluate("window.hacked") is None


def test_x_axis_can_be_time_or_tokens(tmp_path: Path, serve: Callable, tab: Callable) -> None:
    folder = make_run(tmp_path / "hand", num_steps=30)
    append(folder / "eval.jsonl", {"step": 0, "accuracy": 0.424})
    seen = tab(serve(folder).url)
    seen.wait_for("step", "30")
    for axis, last, place in (("time", "12", "0.4s"), ("tokens", "122880", "4,096 tokens")):
        seen.page.get_by_test_id(f"axis-{axis}").click()
        assert float(seen.chart("loss", "data-last-step")) == pytest.approx(float(last))
        seen.page.get_by_test_id("chart-loss").focus()
        seen.page.keyboard.press("Home")
        at = seen.page.get_by_test_id("chart-loss").locator(".at").inner_text()
        assert at.startswith(place)
        assert seen.chart("reward", "data-points") == "31"
    seen.page.reload()
    seen.wait_for("step", "30")
    assert seen.page.get_by_test_id("axis-tokens").get_attribute("aria-pressed") == "true"


def test_settings_of_a_run_can_be_found(tmp_path: Path, serve: Callable, tab: Callable) -> None:
    seen = tab(serve(make_run(tmp_path / "hand", num_steps=3)).url)
    seen.page.get_by_text("train.max_steps").wait_for()
    rows = seen.page.get_by_test_id("settings").locator("tr")
    assert rows.count() == 4
    seen.page.get_by_test_id("find-setting").fill("embedd")
    assert rows.all_inner_texts() == ["model.name\tembedded"]
