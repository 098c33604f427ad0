"""Export of the dashboard with its data as a single HTML file that loads nothing else.

The data is JSON in a script element; text written by a model never becomes markup.
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
REFRESH_SECONDS = 60.0  # time limit for reading the files of one run


def write_report(folders: Sequence[Path], path: Path) -> Path:
    """Write the dashboard of these runs, in their current state, atomically to `path`."""
    replace_file(path, report(open_runs(folders)).encode())
    return path


def report(runs: Sequence[RunFiles]) -> str:
    """Return the HTML; its content security policy allows only its own script and style."""
    html = ICON.sub("", _static("index.html"))
    style = "".join(_static(name) for name in STYLE.findall(html))
    script = "\n".join(_static(name) for name in SCRIPT.findall(html))
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    html = SCRIPT.sub("", STYLE.sub("", html))
    html = html.replace("<title>", f"{meta}\n<style>{style}</style>\n<title>", 1)
    data = f'<script type="application/json" id="report">{_data(runs)}</script>'
    return html.replace("</body>", f"{data}\n<script>{script}</script>\n</body>", 1)


def _data(runs: Sequence[RunFiles]) -> str:
    """Return the data of all runs as JSON without `<`, so that it cannot end the script element."""
    now = time.time()
    exported: list[object] = []
    for run in runs:
        run.refresh(seconds=REFRESH_SECONDS)
        update = view.update(run, now=now)
        exported.append({"name": run.name, "update": update, "samples": view.samples(run)})
    content = nan_to_null({"written": now, "runs": exported})
    return json.dumps(content, allow_nan=False).replace("<", "\\u003c")


def _static(name: str) -> str:
    return (files("peralta_zmq.observe.dashboard") / "static" / name).read_text("utf-8")


def _hash(content: str) -> str:
    """The source expression of an inline script or style in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
