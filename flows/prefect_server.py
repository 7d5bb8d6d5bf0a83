"""A temporary Prefect server for one run, used if the user has configured none and none is running.

Prefect would start one itself, but in our process group. Ctrl-C would then end it while a flow still has to report, and
it would outlive a killed flow. This one has its own session and dies with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo.errors import InputError
from tasks.tracking.database import make_private
from tasks.trainer.processes import never_collected

HOST = "127.0.0.1"
HOSTS = [HOST, "localhost"]
START_S = 300.0
"""Timeout in seconds for the start of a server. It normally takes seconds, but minutes on a very busy machine."""
ANSWER_S = 60.0
"""Timeout in seconds for the first answer of a server that may be busy."""
OPEN_FILES = 128
"""Files that a server may have to open: about 25, plus 3 for each of up to 15 database connections, plus one per client
connection."""

_short_lived = False


def keeps_runs() -> bool:
    """Whether flows report to a permanent server, whose pages can be opened."""
    if _short_lived or not _may_be_configured():
        return False
    from prefect.settings import PREFECT_API_URL

    return bool(PREFECT_API_URL.value())


def _may_be_configured() -> bool:
    """Whether a place that Prefect reads settings from could name a server. Only then is Prefect asked, because loading
    it takes a second of a processor."""
    if "prefect" in sys.modules or any(name.startswith(("PREFECT_API", "PREFECT_PROFILE")) for name in os.environ):
        return True
    own = Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect")
    if any(path.exists() for path in (own / "profiles.toml", Path("prefect.toml"))):
        return True
    mentions = {Path(".env"): b"PREFECT_", Path("pyproject.toml"): b"tool.prefect"}
    try:
        return any(path.is_file() and word in path.read_bytes() for path, word in mentions.items())
    except OSError:  # not readable; Prefect says what it makes of that
        return True


def without_heartbeat() -> Any:
    """Context manager that turns off heartbeats of flows. For each flow, Prefect waits up to a second for the heartbeat
    thread to stop, and nobody reads the heartbeats."""
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    if PREFECT_FLOWS_HEARTBEAT_FREQUENCY.value() is None:
        return contextlib.nullcontext()  # copying the settings takes 50 ms per stage
    return temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})


@contextlib.contextmanager
def prefect_server(logs: Path) -> Iterator[None]:
    """Flows in the block report to the server in the user's settings, or else to a temporary one, which logs to
    `logs`."""
    global _short_lived
    from prefect.settings import (
        PREFECT_API_AUTH_STRING,
        PREFECT_API_URL,
        PREFECT_LOGGING_TO_API_ENABLED,
        temporary_settings,
    )

    if PREFECT_API_URL.value():
        check_server(PREFECT_API_URL.value())
        yield
        return
    own = _OwnServer(logs)
    try:
        settings = {
            PREFECT_API_URL: own.wait(),
            PREFECT_API_AUTH_STRING: own.password,
            PREFECT_LOGGING_TO_API_ENABLED: False,  # nobody opens its pages
        }
        with temporary_settings(settings), without_heartbeat(), own.must_live():
            _short_lived = True
            yield
    finally:
        _short_lived = False
        own.stop()


class _OwnServer:
    """A temporary Prefect server. It starts on construction."""

    def __init__(self, logs: Path) -> None:
        check_open_files()
        self.port, self.password = free_port(), f"r1flow:{secrets.token_urlsafe(32)}"
        self.log = logs / "prefect-run.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.deadline = time.monotonic() + START_S
        # Blocks are only for its pages, which nobody opens.
        settings = {
            "PREFECT_UI_ENABLED": "0",
            "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "0",
            "PREFECT_SERVER_API_AUTH_STRING": self.password,
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": f"http://{HOST}:{self.port}",
        }
        private_database()
        # If several servers create the tables of a new home at the same time, all but one fail. So they start one after
        # the other: each locks its log, and we unlock it once the server answers.
        self.output = self.log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flows.prefect_server", str(self.port), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.output,
            env={**os.environ, **settings},
            start_new_session=True,
        )

    def wait(self) -> str:
        """Waits for the server. Returns the URL of its API."""
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > self.deadline:
                raise InputError(f"the local Prefect server did not start; see {self.log}")
            time.sleep(0.05)
        fcntl.flock(self.output, fcntl.LOCK_UN)
        return f"http://{HOST}:{self.port}/api"

    @contextlib.contextmanager
    def must_live(self) -> Iterator[None]:
        """Says in one line that the server has ended if a request in the block fails for that reason."""
        import httpx

        try:
            yield
        except httpx.TransportError as error:
            if is_open(self.port):
                raise
            raise InputError(
                f"the local Prefect server ended ({error}); see {self.log}; the same command again goes on"
            ) from error

    def _answers(self) -> bool:
        """Whether it answers. The kernel also accepts connections for a server that cannot, and Prefect's client would
        then keep trying for minutes."""
        import httpx

        if not is_open(self.port):
            return False
        try:
            return httpx.get(f"http://{HOST}:{self.port}/api/health", timeout=10).is_success
        except httpx.HTTPError:
            return False

    def stop(self) -> None:
        self.output.close()
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def check_open_files() -> None:
    """Raises InputError if a server may open too few files: it would start, and then accept no connections."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed != resource.RLIM_INFINITY and allowed < OPEN_FILES:
        raise InputError(
            f"a process may open {allowed} files here, and the local Prefect server needs {OPEN_FILES}; raise the "
            "limit (ulimit -n 1024), or set PREFECT_API_URL to a running server"
        )


def private_database() -> None:
    """Creates an empty private file for a local server's SQLite database. The server would create it with the umask's
    permissions."""
    if folder := os.environ.get("PREFECT_HOME"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        make_private(Path(folder) / "prefect.db")


def check_server(url: str | None) -> str:
    """Sends one request to the server and returns its URL. Prefect's client would try for a minute and end in a
    traceback.

    Raises:
        InputError: no server is given, or what answers there is not Prefect's API.
    """
    import httpx

    if not url:
        raise InputError("no Prefect server is named; start one with `r1 up`, or set PREFECT_API_URL")
    try:
        answer = httpx.get(f"{url}/health", timeout=httpx.Timeout(ANSWER_S, connect=10))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{url}: no Prefect server answers ({why}); start it, or correct PREFECT_API_URL") from None
    if answer.status_code == 404 or "html" in answer.headers.get("content-type", ""):
        raise InputError(f"{url}: something answers, but it is not Prefect's API; PREFECT_API_URL ends in /api")
    return url


def free_port() -> int:
    """A TCP port that is currently free."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def is_open(port: int) -> bool:
    """Whether a process listens on this port of the loopback interface."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0


def create_app() -> Any:
    """The app factory that uvicorn calls: Prefect's own app, for requests that name its own address as their host."""
    with never_collected():  # it starts in half the time
        from prefect.server.api.server import create_app as create_prefect_app

        return for_own_hosts(create_prefect_app())


def serving(factory: str, port: str) -> list[str]:
    """The command that serves the app of a factory in this package on a port of the loopback interface."""
    # Without --app-dir, uvicorn would look for the package in the working folder first.
    app = ["--app-dir", str(Path(__file__).parents[1]), "--factory", factory]
    place = ["--host", HOST, "--port", port, "--log-level", "error", "--lifespan", "on"]
    return [sys.executable, "-m", "uvicorn", *app, *place]


def for_own_hosts(app: Any) -> Any:
    """Refuses requests for other hosts than the loopback interface. Prefect accepts any, so a page whose domain
    resolves to 127.0.0.1 would count as the same origin."""
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    return TrustedHostMiddleware(app, allowed_hosts=HOSTS, www_redirect=False)


def main(port: str, parent: str) -> None:
    """Waits until no other server of this home is starting, then becomes the server. On Linux, it first asks the kernel
    to end it when its parent ends."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() != int(parent):
            sys.exit(1)  # the parent died before prctl took effect
    fcntl.flock(sys.stdout, fcntl.LOCK_EX)
    os.execv(sys.executable, serving("flows.prefect_server:create_app", port))


if __name__ == "__main__":
    main(*sys.argv[1:])
