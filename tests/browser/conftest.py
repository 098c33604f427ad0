"""Fixtures for browser tests: Chromium tabs, and bin/dashboard as a subprocess."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium-headless-shell")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = None if CHROMIUM else "no chromium-headless-shell; apt-get install it"
    try:
        import playwright  # noqa: F401
    except ModuleNotFoundError:
        missing = "no playwright; make setup"
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.timeout(600))
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))


@dataclass
class DashboardServer:
    """A bin/dashboard process that keeps its port across restarts."""

    folders: list[Path]
    port: int = 0
    process: subprocess.Popen[str] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> DashboardServer:
        command = [sys.executable, str(ROOT / "bin" / "dashboard"), *map(str, self.folders),
                   "--port", str(self.port)]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        self.port = int(self.process.stdout.readline().rsplit(":", 1)[1])
        return self

    def kill(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout
            self.process.stdout.close()
            self.process = None


@pytest.fixture
def serve() -> Iterator[Callable[..., DashboardServer]]:
    """Serve run folders until the end of the test."""
    servers: list[DashboardServer] = []

    def start(*folders: Path) -> DashboardServer:
        servers.append(DashboardServer(list(folders)))
        return servers[-1].start()

    yield start
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Tab:
    """A browser tab that records its errors and requests."""

    def __init__(self, browser: object, **options: object) -> None:
        self.page = browser.new_page(**options)  # type: ignore[attr-defined]
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self._log(message.type, message.text))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.set_default_timeout(15_000)

    def text(self, testid: str) -> str:
        return self.page.get_by_test_id(testid).inner_text()

    def wait_for(self, testid: str, text: str, *, seconds: float = 15.0) -> None:
        from playwright.sync_api import expect

        expect(self.page.get_by_test_id(testid)).to_have_text(text, timeout=1000 * seconds)

    def chart(self, name: str, attribute: str) -> str | None:
        return self.page.get_by_test_id(f"chart-{name}").get_attribute(attribute)

    def _log(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.problems.append(text)


@pytest.fixture
def tab(browser: object) -> Iterator[Callable[..., Tab]]:
    """Open tabs; the test fails on console errors and on requests to other hosts."""
    opened: list[Tab] = []

    def open_tab(url: str, *, lost: bool = False, **options: object) -> Tab:
        opened_tab = Tab(browser, **options)
        opened_tab.origin, opened_tab.lost = url, lost
        opened.append(opened_tab)
        opened_tab.page.goto(url)
        return opened_tab

    yield open_tab
    for opened_tab in opened:
        opened_tab.page.close()
        assert opened_tab.lost or opened_tab.problems == []
        foreign = [url for url in opened_tab.requests if not url.startswith(opened_tab.origin)]
        assert foreign == []
