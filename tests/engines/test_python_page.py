"""The example of docs/python.md that uses an engine alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SMOL = Path.home() / ".cache/peralta_zmq/SmolLM2-135M-Instruct"


def example() -> str:
    """The code of the section."""
    page = (ROOT / "docs" / "python.md").read_text("utf-8")
    section = page.partition("## An engine alone\n")[2]
    return section.partition("```python\n")[2].partition("```")[0]


@pytest.mark.parametrize("model", ["embedded", pytest.param(str(SMOL), marks=pytest.mark.slow)])
def test_engine_alone_prints_texts_tokens_and_logprobs(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if model != "embedded" and not SMOL.is_dir():
        pytest.skip("the real model is not on this machine")
    variables: dict[str, Any] = {}
    exec(example().replace("embedded", model), variables)
    printed = capsys.readouterr().out
    completions = variables["completions"]
    assert {completion.index for completion in completions} == set(range(4))
    for completion in completions:
        assert completion.text in printed
        assert len(completion.logprobs) == len(completion.token_ids) > 0
        assert np.isfinite(completion.logprobs).all() and (completion.logprobs <= 0).all()
