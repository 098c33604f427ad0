"""Who may ask the page for what: reading only, by its own name, with the token where one is set.

Knows HTTP; knows nothing of runs. A page of a stranger that the same browser shows can send
requests here, also under a name that it lets point to this machine: hence the check of Host.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peralta_zmq.observe.dashboard.server import is_loopback

COOKIE = "peralta_token"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Guard:
    """ASGI middleware that answers what may not be asked, and puts HEADERS on everything."""

    app: ASGIApp
    host: str  # that we listen on
    token: str | None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if scope["type"] == "http":
            await (self._refusal(scope) or self.app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this page only reads", 405, {"Allow": "GET, HEAD"})
        if not self._is_ours(headers.get("host", "")):
            return PlainTextResponse("this is not the name of this machine", 400)
        return self._without_token(scope, headers) if self.token else None

    def _is_ours(self, given: str) -> bool:
        """Names can be made to point here by anyone, addresses cannot."""
        name = given.partition("]")[0].strip("[") if "[" in given else given.partition(":")[0]
        name = name.lower().removesuffix(".")
        own = socket.gethostname().lower()
        if is_loopback(self.host) or not self.token:
            return is_loopback(name)
        try:
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return name in {"localhost", self.host.lower(), own, f"{own}.local"}

    def _without_token(self, scope: Scope, headers: Mapping[str, str]) -> Response | None:
        """Asks for the token, or takes it from the address into a cookie."""
        assert self.token
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if given and self._fits(given):
            answer = RedirectResponse(scope["path"], 303)
            answer.set_cookie(COOKIE, given, httponly=True, samesite="strict")
            return answer
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        if self._fits(bearer) or self._fits(cookie):
            return None
        return PlainTextResponse("open /?token=..., with the password in dashboard.token_file", 401)

    def _fits(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self.token or "").encode())
