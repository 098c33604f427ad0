"""The example of docs/python.md that uses the learner alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[1] / "docs" / "python.md"


def test_example_of_the_page_takes_a_training_step() -> None:
    section = PAGE.read_text("utf-8").partition("\n## The learner alone\n")[2]
    (code,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    before, after = code.split("result = ")
    namespace: dict[str, Any] = {}
    exec(before, namespace)
    first = [parameter.detach().clone() for parameter in namespace["policy"].parameters()]
    exec(f"result = {after}", namespace)
    assert namespace["learner"].step == 1
    assert 0 < namespace["result"].metrics["reward"] < 1
    changed = zip(first, namespace["policy"].parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in changed)
