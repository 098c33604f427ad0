"""The page with its numbers in one file, which opens from a disk and asks for nothing.

Knows the page's files; knows nothing of HTTP. The numbers stand in it as JSON; no word of a model
becomes markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from peralta_zmq.atomic_files import replace_file
from peralta_zmq.observe.dashboard import view
from peralta_zmq.observe.dashboard.run_files import RunFiles, open_runs
from peralta_zmq.observe.metrics import nan_to_null

STYLE = re.compile(r'<link rel="stylesheet" href="([\w.-]+)">')
SCRIPT = re.compile(r'<script defer src="([\w.-]+)"></script>')
ICON = re.compile(r'<link rel="icon"[^>]*>\n')
END = "</body>"


def write_report(folders: Sequence[Path], path: Path) -> Path:
    """Write the page of these runs, as they are now, to `path`, whole."""
    replace_file(path, report(open_runs(folders)).encode())
    return path


def report(runs: Sequence[RunFiles]) -> str:
    """The HTML; its policy lets only its own two parts run."""
    page = ICON.sub("", _text("index.html"))
    style = "".join(_text(name) for name in STYLE.findall(page))
    script = "\n".join(_text(name) for name in SCRIPT.findall(page))
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
    )
    page = SCRIPT.sub("", STYLE.sub("", page)).replace("<title>", f"{head}<title>", 1)
    written = f'<script type="application/json" id="report">{_numbers(runs)}</script>\n'
    return page.replace(END, f"{written}<script>{script}</script>\n{END}", 1)


def _numbers(runs: Sequence[RunFiles]) -> str:
    """As JSON that may stand in a script element."""
    now = time.time()
    known: list[object] = []
    for run in runs:
        run.refresh(patience=60.0)
        answer = view.answer(run, now=now)
        known.append({"name": run.name, "answer": answer, "samples": view.samples(run)})
    told = {"written": now, "runs": known}
    return json.dumps(nan_to_null(told), allow_nan=False).replace("<", "\\u003c")


def _text(name: str) -> str:
    there = files("peralta_zmq.observe.dashboard") / "static" / name
    return there.read_text("utf-8")


def _digest(content: str) -> str:
    """As a content security policy names an inline part."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
