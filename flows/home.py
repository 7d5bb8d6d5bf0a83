"""The home folder (~/.r1flow, or R1FLOW_HOME), which holds all files that r1flow writes, and settings of its
services."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import stat
from pathlib import Path

from grpo.errors import InputError
from tasks.paths import expanded
from tasks.store.store import Store
from tasks.tracking.client import Tracking
from tasks.tracking.connection import default_uri
from tasks.tracking.database import close_file

LOGGERS = "flows.progress,flows,tasks,grpo"
"""Loggers whose lines appear in the logs of a flow run (PREFECT_LOGGING_EXTRA_LOGGERS). The pools name them too."""
GPU_LIMIT = "r1-gpus"
"""Name of Prefect's global concurrency limit with one slot per GPU."""
STATE = "up.json"
"""File with the state of a running installation: its supervisor and the addresses of its servers."""
POSTGRES = "postgres"
"""Folder of this home's PostgreSQL cluster."""
REPORTS = "reports"
"""Folder of the report pages of runs."""
REPORT_PAGES = "/r1-reports/"
"""URL path under which this home's Prefect server shows the report pages."""
CACHE_GB = "100"
"""Gigabytes of copies of an object store's artifacts in the home folder, unless R1FLOW_CACHE_GB says otherwise."""
PREFECT_PASSWORD = "credentials/prefect"
"""File with the password of this home's Prefect server, in the form of PREFECT_API_AUTH_STRING."""


def home() -> Path:
    """The home folder as an absolute path: R1FLOW_HOME, or ~/.r1flow."""
    return expanded(os.environ.get("R1FLOW_HOME") or "~/.r1flow").absolute()


def store() -> Store:
    """The artifact store of the home folder. With R1FLOW_STORE, its artifacts are in that object store.

    Raises:
        InputError: R1FLOW_STORE or R1FLOW_CACHE_GB is wrong.
    """
    url = os.environ.get("R1FLOW_STORE")
    return _with_objects(home(), url, os.environ.get("R1FLOW_CACHE_GB") or CACHE_GB) if url else Store(home())


@functools.cache
def _with_objects(place: Path, url: str, gigabytes: str) -> Store:
    """The same object for every call: it holds a connection, and the locks of the copies that this process uses."""
    from tasks.store.objects.object_store import ObjectStore, cache_bytes

    return Store(place, ObjectStore(place, url, cache_bytes(gigabytes)))


def tracking() -> Tracking:
    """MLflow at MLFLOW_TRACKING_URI, or a database in the home folder."""
    by_worker = "PREFECT__FLOW_RUN_ID" in os.environ  # nobody is there to correct an address
    return Tracking(os.environ.get("MLFLOW_TRACKING_URI") or default_uri(home()), expected=by_worker)


def prepare_environment() -> None:
    """Keeps Prefect's data in the home folder unless the user has configured otherwise. Call before importing
    Prefect."""
    try:
        _open_to_us_alone(home())
    except OSError as error:
        raise InputError(f"{home()}: {error.strerror}; set R1FLOW_HOME to a folder that can be written") from None
    defaults = {
        "PREFECT_HOME": str(home() / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # The command prints one line for a failure. Prefect would add a traceback.
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_INTERNAL_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_EXTRA_LOGGERS": LOGGERS,
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # log lines outside of a flow stay here
        "PYTHONSAFEPATH": "1",  # so that a folder of the user, such as flows/, does not hide ours
        "DO_NOT_TRACK": "1",
        "MPLCONFIGDIR": str(home() / "matplotlib"),  # MLflow imports matplotlib, which caches fonts
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    use_servers()


def _open_to_us_alone(place: Path) -> None:
    """Creates the home folder, or denies other users access to it and to its databases.

    In a folder that passes its group on to its files (setgid), the group keeps its access. A folder stays as it is if
    it is not ours, belongs to everybody (sticky bit, like /tmp), or is more than a home of r1flow.
    """
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = place.stat()
    if not os.access(place, os.W_OK | os.X_OK):
        raise OSError(errno.EROFS, "this folder cannot be written")
    (place / "prefect").mkdir(exist_ok=True)
    if state.st_uid != os.geteuid() or state.st_mode & stat.S_ISVTX or place in (Path.home(), Path(place.anchor)):
        return
    closed = 0o007 if state.st_mode & stat.S_ISGID else 0o077
    if os.geteuid() == 0 and (place / POSTGRES).exists():
        closed &= ~0o001  # the cluster belongs to another user, who must be able to pass through
    if state.st_mode & closed:
        place.chmod(stat.S_IMODE(state.st_mode) & ~closed)
    for database in [*place.glob("*.db*"), *place.glob("prefect/*.db*")]:
        with contextlib.suppress(OSError):  # it belongs to another user of the group, or was temporary
            close_file(database)


def report_address(file: str) -> str | None:
    """URL of a report page on this home's Prefect server; None while neither `r1 up` nor `r1 ui` is running."""
    prefect = str(read_state(home()).get("prefect") or "")
    return prefect.removesuffix("/api") + REPORT_PAGES + file if prefect else None


def read_state(home: Path) -> dict[str, object]:
    """The last state written by this home's installation; empty if there is none."""
    try:
        state = json.loads((home / STATE).read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def use_servers() -> None:
    """Uses the servers of `r1 up` or `r1 ui` if they are running, so that their pages show this run."""
    state = read_state(home())
    prefect, tracked = state.get("prefect"), state.get("tracking")
    if "PREFECT_API_URL" in os.environ or not prefect or not _answers(str(prefect)):
        return
    os.environ["PREFECT_API_URL"] = str(prefect)
    password = home() / PREFECT_PASSWORD
    if password.exists():
        os.environ["PREFECT_API_AUTH_STRING"] = password.read_text()
    if tracked:
        os.environ.setdefault("MLFLOW_TRACKING_URI", str(tracked))


def _answers(url: str) -> bool:
    import httpx

    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TimeoutException:
        return True  # the server is running, but busy
    except httpx.HTTPError:
        return False
