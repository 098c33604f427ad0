"""The program bin/dashboard, its HTML file and the static files."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
from synthetic_runs import append, group, make_run

from peralta_zmq.errors import ConfigError
from peralta_zmq.observe.dashboard.__main__ import main
from peralta_zmq.observe.dashboard.run_files import RunFiles
from peralta_zmq.observe.dashboard.view import report

STATIC = files("peralta_zmq.observe.dashboard") / "static"


def test_report_allows_only_its_own_script_and_style(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "hand", num_steps=3)
    append(folder / "samples.jsonl", group(3, "</script><script>alert(1)</script>", "b"))
    html = report([RunFiles(folder)])
    assert "default-src 'none'; script-src 'sha256-" in html
    assert html.count("<script") == html.count("</script>") == 2
    assert "http://" not in html.replace("http://www.w3.org/", "").replace("http://${", "")
    assert "src=" not in html.partition('<script type="application/json"')[0]


def test_program_exports_a_file_and_refuses_invalid_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "hand", num_steps=3)
    assert main([str(folder), "--export", str(tmp_path / "report.html")]) == 0
    assert (tmp_path / "report.html").stat().st_size > 50_000
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    with pytest.raises(ConfigError, match="is not a run folder and has none"):
        main([str(tmp_path / "nothing")])
    with pytest.raises(ConfigError, match="unknown option --exprot; did you mean --export"):
        main([str(folder), "--exprot", "x.html"])
    with pytest.raises(ConfigError, match="cannot be written"):
        main([str(folder), "--export", str(tmp_path / "no" / "report.html")])


@pytest.mark.parametrize(
    "name", ["dashboard.js", "charts.js", "samples.js", "answers.js", "settings.js"]
)
def test_scripts_never_create_markup(name: str) -> None:
    script = (STATIC / name).read_text("utf-8")
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                "new Function", "DOMParser", "createContextualFragment"):  # fmt: skip
        assert way not in script
