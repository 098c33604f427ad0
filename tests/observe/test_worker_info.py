"""What a worker says when it joins, on one line."""

from __future__ import annotations

from peralta_zmq.observe.worker_info import worker_info_text

HERE = {"package": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "transformers": "5.1.0",
        "device": "cuda:0", "dtype": "bfloat16", "threads": "8"}  # fmt: skip


def test_versions_that_are_as_here_are_not_listed() -> None:
    hello = {**HERE, "device": "cpu", "dtype": "float32", "threads": "2"}
    assert worker_info_text("ann", hello, here=HERE) == (
        "generator ann: cpu float32, threads: 2; versions as here"
    )


def test_versions_that_differ_are_named_with_ours() -> None:
    hello = {**HERE, "python": "3.10.12", "torch": "2.6.0"}
    assert worker_info_text("ann", hello, here=HERE) == (
        "generator ann: cuda:0 bfloat16, threads: 8; "
        "Python 3.10.12 (here 3.11.7), torch 2.6.0 (here 2.13.0)"
    )


def test_hello_of_another_version_is_shown_as_far_as_it_goes() -> None:
    hello = {"torch": "3.0", "mood": "good"}
    assert worker_info_text("ann", hello, here={}) == (
        "generator ann: device unknown; torch 3.0 (here unknown)"
    )


def test_hello_cannot_move_the_cursor() -> None:
    assert "\x1b" not in worker_info_text("ann", {"device": "\x1b[2J"}, here=HERE)
