"""HTTP server of the dashboard: routes and their responses.

    /                        the web page; /dashboard.js and other static files belong to it. Of
                             several runs it lists all, and with ?run=NAME it shows one, or more
    /api/runs                names and newest values of the runs
    /api/runs/N?cursor=...   changes in run N since the update that returned this cursor
    /api/runs/N/samples      sampled groups: the newest, or from ?first=NUMBER or ?step=STEP on
    /api/runs/N/answers      answers to the held-out problems in the evaluation of ?step=STEP
    /api/runs/N/settings     settings of the run
    /metrics                 newest metrics of all runs, for Prometheus
    /healthz                 newest step of each run, for health checks

Static files are read into memory at the start: no request can choose a path on the disk.
"""

from __future__ import annotations

import json
import mimetypes
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from peralta_zmq.addresses import is_loopback
from peralta_zmq.http_server import HttpServer, Limits, open_port
from peralta_zmq.observe import prometheus
from peralta_zmq.observe.dashboard import view
from peralta_zmq.observe.dashboard.run_files import RunFiles, RunList
from peralta_zmq.observe.metrics import nan_to_null

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Dashboard:
    """HTTP server of the runs in `folders` (see RunList). Use with `closing`.

    `port` is the first port to try; 0 means any free port. `token` is a password, required if other
    machines can reach `host`. `banner` has the lines to print. Raises ConfigError if no port is
    free or the token is missing.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        host: str,
        port: int,
        token: str | None = None,
        live: bool = False,
        limits: Limits | None = None,
    ) -> None:
        self._runs = RunList(folders, live=live)
        routes = [
            Route("/api/runs", self.overview),
            Route("/api/runs/{number:int}", self.update),
            Route("/api/runs/{number:int}/samples", self.samples),
            Route("/api/runs/{number:int}/answers", self.answers),
            Route("/api/runs/{number:int}/settings", self.settings),
            Route("/metrics", self.metrics),
            Route("/healthz", self.health),
            *(Route(path, file, methods=["GET"]) for path, file in _static_files().items()),
        ]
        self.server = HttpServer(
            "dashboard",
            routes,
            listening=open_port(
                host, port, token=token, settings=("dashboard.host", "dashboard.port"), num_ports=20
            ),
            token=token,
            token_setting="dashboard.token_file",
            has_login=True,
            headers=SECURITY_HEADERS,
            limits=limits,
        )
        self.port = self.server.port
        self.banner = _banner(host, port, self.port)

    def close(self) -> None:
        self.server.close()

    async def overview(self, request: Request) -> Response:
        now = time.time()
        return _json({"runs": [view.overview(run, now=now) for run in self._refreshed()]})

    async def update(self, request: Request) -> Response:
        cursor = request.query_params.get("cursor", "")
        return _json(view.update(self._run_of(request), cursor=cursor, now=time.time()))

    async def samples(self, request: Request) -> Response:
        first = _number_in(request, "first")
        step = _number_in(request, "step")
        return _json({"samples": view.samples(self._run_of(request), first=first, step=step)})

    async def answers(self, request: Request) -> Response:
        return _json(view.answers(self._run_of(request), step=_number_in(request, "step") or 0))

    async def settings(self, request: Request) -> Response:
        return _json({"settings": view.settings(self._run_of(request))})

    async def metrics(self, request: Request) -> Response:
        text = prometheus.exposition({run.name: run.last for run in self._refreshed()})
        return PlainTextResponse(text, media_type=prometheus.CONTENT_TYPE)

    async def health(self, request: Request) -> Response:
        now = time.time()
        newest = {
            run.name: {"step": run.last.get("step"), "age_seconds": now - run.newest_time}
            for run in self._refreshed()
        }
        return _json({"status": "ok", "runs": newest})

    def _run_of(self, request: Request) -> RunFiles:
        number = int(request.path_params["number"])
        if number >= len(self._runs.runs):
            raise HTTPException(404, "no such run")
        self._runs.runs[number].refresh()
        return self._runs.runs[number]

    def _refreshed(self) -> Sequence[RunFiles]:
        self._runs.find()
        self._runs.refresh()
        return self._runs.runs


def _number_in(request: Request, name: str) -> int | None:
    text = request.query_params.get(name)
    if text is not None and not (text.isdecimal() and len(text) <= 12):
        raise HTTPException(400, f"{name} is not a number")
    return None if text is None else int(text)


def _banner(host: str, requested_port: int, port: int) -> list[str]:
    """The address, and a warning if other machines can connect, as lines."""
    name = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):  # all interfaces: not an address that a browser can open
        name = socket.gethostname()
    reason = f" (port {requested_port} is taken)" if requested_port not in (0, port) else ""
    lines = [f"dashboard: http://{name}:{port}{reason}"]
    if not is_loopback(host):
        lines.append(
            "warning: other machines can open the dashboard with the token, without "
            f"encryption: http://{name}:{port}/?token=..."
        )
    return lines


def _static_files() -> Mapping[str, Response]:
    """A (reusable) response for each static file, by URL path."""
    responses = {
        f"/{file.name}": Response(file.read_bytes(), media_type=media_type)
        for file in view.STATIC.iterdir()
        if (media_type := mimetypes.guess_type(file.name)[0])
    }
    return {**responses, "/": responses["/index.html"]}


def _json(content: Mapping[str, Any]) -> Response:
    # In ASCII: generated text may have unpaired surrogates, which UTF-8 cannot encode.
    return Response(json.dumps(nan_to_null(content)), media_type="application/json")
