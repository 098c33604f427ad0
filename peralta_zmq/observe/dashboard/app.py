"""The routes of the page. The one door to starlette, with its guard.

    /                        the page; its files beside it
    /api/runs                names of the runs
    /api/runs/N?cursor=...   what is new of run N
    /api/runs/N/samples      whole groups, ?after=NUMBER
    /metrics, /healthz       of all runs, for Prometheus and for whoever wants to know

Knows addresses and views. A file is served by its name in a table that was read at the start; no
path of a request ever reaches the disk.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from peralta_zmq.observe import prometheus
from peralta_zmq.observe.dashboard import view
from peralta_zmq.observe.dashboard.guard import Guard
from peralta_zmq.observe.dashboard.run_files import RunFiles
from peralta_zmq.observe.metrics import nan_to_null

KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
MAX_CURSOR = 200
logger = logging.getLogger(__name__)


def make_app(runs: Sequence[RunFiles], *, host: str, token: str | None) -> ASGIApp:
    """The application that shows `runs` to those who may ask at `host`."""

    def run_of(request: Request) -> RunFiles:
        number = int(request.path_params["number"])
        if number >= len(runs):
            raise HTTPException(404, "there is no such run")
        run = runs[number]
        run.refresh()
        return run

    async def names(request: Request) -> Response:
        return _json({"runs": [run.name for run in runs]})

    async def one(request: Request) -> Response:
        cursor = request.query_params.get("cursor", "")[:MAX_CURSOR]
        return _json(view.answer(run_of(request), cursor=cursor, now=time.time()))

    async def samples(request: Request) -> Response:
        after = request.query_params.get("after", "0")
        if not after.isdecimal() or len(after) > 12:
            raise HTTPException(400, "after is a number")
        return _json({"samples": view.samples(run_of(request), after=int(after))})

    async def metrics(request: Request) -> Response:
        told = prometheus.exposition({run.name: run.last for run in _refreshed(runs)})
        return PlainTextResponse(told, media_type=prometheus.CONTENT_TYPE)

    async def health(request: Request) -> Response:
        return _json({"status": "ok", "runs": _ages(_refreshed(runs), now=time.time())})

    routes = [
        Route("/api/runs", names),
        Route("/api/runs/{number:int}", one),
        Route("/api/runs/{number:int}/samples", samples),
        Route("/metrics", metrics),
        Route("/healthz", health),
        *(Route(path, page) for path, page in _pages().items()),
    ]
    shown = Starlette(routes=routes, exception_handlers={Exception: _teller()})
    return Guard(shown, host=host, token=token)


def _refreshed(runs: Sequence[RunFiles]) -> Sequence[RunFiles]:
    for run in runs:
        run.refresh()
    return runs


def _ages(runs: Sequence[RunFiles], *, now: float) -> dict[str, object]:
    """By name the newest step, and for how many seconds nothing was heard."""
    return {
        run.name: {"step": run.last.get("step"), "age_seconds": now - run.newest_time}
        for run in runs
    }


def _teller() -> Callable[[Request, Exception], Awaitable[Response]]:
    """Answers for a fault of ours; a page asks every second, so each kind is told once."""
    told: set[str] = set()

    async def failed(request: Request, error: Exception) -> Response:
        if (kind := type(error).__name__) not in told:
            told.add(kind)
            logger.warning("the page fails at %s (%.300r)", request.url.path, error)
        return PlainTextResponse("the page has a fault; the log of its process names it", 500)

    return failed


def _pages() -> Mapping[str, Response]:
    """The page's files by their path; a response without a body of its own can be sent again."""
    there = files("peralta_zmq.observe.dashboard") / "static"
    known = [(each.name, each) for each in there.iterdir()]
    pages = {
        f"/{name}": Response(each.read_bytes(), media_type=KINDS[name.rpartition(".")[2]])
        for name, each in known if name.rpartition(".")[2] in KINDS
    }  # fmt: skip
    return {**pages, "/": pages["/index.html"]}


def _json(content: Mapping[str, Any]) -> Response:
    """ASCII, so that half a surrogate pair in a model's words is no fault."""
    return Response(
        json.dumps(nan_to_null(content), allow_nan=False), media_type="application/json"
    )
