"""Prefect's server as an installation runs it: it only answers requests for its own address, has a sign-in link for
browsers, and shows the report pages of runs.

Prefect itself checks the password (PREFECT_SERVER_API_AUTH_STRING) of every request and websocket. Its sign-in form
would have to be filled in by hand.
"""

from __future__ import annotations

import re

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from flows.home import REPORT_PAGES, REPORTS, home
from flows.prefect_server import for_own_hosts

SIGN_IN = "/r1-sign-in"
"""Path of the page that signs a browser in. The password is in the URL fragment, which browsers send to no server."""
PAGE = """<!doctype html><title>r1flow</title><script>
localStorage.setItem("prefect-password", btoa(decodeURIComponent(location.hash.slice(1))));
location.replace("/");
</script>"""
"""Page that stores the password where Prefect's own sign-in form stores it."""


REPORT_POLICY = (
    "sandbox allow-scripts allow-popups allow-popups-to-escape-sandbox; "
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
)
"""Content-Security-Policy of a report. A report shows text that models wrote, so it gets a separate origin: any script
in it can read neither the password nor Prefect."""


async def _report(request: Request) -> Response:
    path = home() / REPORTS / f"{request.path_params['run']}.html"
    if not re.fullmatch("[0-9a-f]+", request.path_params["run"]) or not path.is_file():
        return PlainTextResponse("no such report; `r1 report RUN` makes it", status_code=404)
    headers = {"Content-Security-Policy": REPORT_POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
    return FileResponse(path, media_type="text/html", headers=headers)


async def _sign_in(_: Request) -> HTMLResponse:
    return HTMLResponse(PAGE, headers={"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"})


class OwnPages:
    """Prefect's app with the sign-in page and the report pages in front of it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.pages = Starlette(routes=[Route(SIGN_IN, _sign_in), Route(REPORT_PAGES + "{run}.html", _report)])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ours = scope["type"] == "http" and (scope["path"] == SIGN_IN or scope["path"].startswith(REPORT_PAGES))
        await (self.pages if ours else self.app)(scope, receive, send)


def create_app() -> ASGIApp:
    """The app factory that uvicorn calls."""
    from prefect.server.api.server import create_app as create_prefect_app

    return for_own_hosts(OwnPages(create_prefect_app()))
