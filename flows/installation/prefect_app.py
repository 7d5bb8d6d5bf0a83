"""Prefect's server as an installation runs it: it answers to its own address alone, and a link signs a browser in.

Prefect itself checks the password (PREFECT_SERVER_API_AUTH_STRING) of every request and websocket. What it lacks is
here. It takes any Host header, so that a page whose domain resolves to 127.0.0.1 would count as the same origin. And
its sign-in form would have to be filled in by hand.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

HOSTS = ["127.0.0.1", "localhost"]
SIGN_IN = "/r1-sign-in"
"""Path of the page that signs a browser in. The password follows in the fragment, which browsers send to no server."""
PAGE = """<!doctype html><title>r1flow</title><script>
localStorage.setItem("prefect-password", btoa(decodeURIComponent(location.hash.slice(1))));
location.replace("/");
</script>"""
"""Stores the password where Prefect's own sign-in form stores it."""


async def _sign_in(_: Request) -> HTMLResponse:
    return HTMLResponse(PAGE, headers={"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"})


class SignIn:
    """Prefect's app with the sign-in page in front of it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.page = Starlette(routes=[Route(SIGN_IN, _sign_in)])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.page if scope["type"] == "http" and scope["path"] == SIGN_IN else self.app
        await app(scope, receive, send)


def create_app() -> ASGIApp:
    """The factory that uvicorn calls."""
    from prefect.server.api.server import create_app as create_prefect_app

    return TrustedHostMiddleware(SignIn(create_prefect_app()), allowed_hosts=HOSTS, www_redirect=False)
