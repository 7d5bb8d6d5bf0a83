"""A whole installation for slow tests: `r1 up` in a home of its own, asked through Prefect's API as its UI does."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from flows.home import PREFECT_PASSWORD
from flows.installation.orphans import living
from flows.prefect_server import free_port
from grpo.processes.lifetime import process_name
from tests.support.r1 import R1, SMALLER

DEADLINE_S = 3600.0
"""For one step of a test; processors are shared, and what hangs is seen by its state, not by the clock."""


needs_postgres = pytest.mark.skipif(find_spec("psycopg") is None, reason="needs the extra postgres")


class Installation(R1):
    """`r1` with a home in which an installation is up."""

    def __init__(self, home: Path, *flags: str):
        super().__init__(home)
        self.prefect_port, self.mlflow_port = free_port(), free_port()
        self.flags = flags

    def up(self) -> str:
        ports = ["--prefect-port", str(self.prefect_port), "--mlflow-port", str(self.mlflow_port)]
        done = self("up", *ports, *self.flags)
        assert done.returncode == 0, done.stderr[-3000:] + self.logs()
        return done.stdout

    def logs(self) -> str:
        ends = [f"== {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.home.glob("logs/*.log"))]
        return "\n".join(ends)

    def state(self) -> dict[str, Any]:
        return json.loads((self.home / "up.json").read_text())

    def pid(self, part: str) -> int:
        return int(self.state()["parts"][part].split()[0])

    def credential(self) -> tuple[str, str]:
        """User and password of the Prefect server."""
        user, _, password = (self.home / PREFECT_PASSWORD).read_text().partition(":")
        return user, password

    def ask(self, method: str, path: str, **body: Any) -> Any:
        url = f"http://127.0.0.1:{self.prefect_port}/api{path}"
        for _ in range(20):
            answer = httpx.request(method, url, json=body or None, timeout=600, auth=self.credential())
            # Its database was locked, or too busy, for too long. What may have been done is not done twice.
            if not (answer.status_code == 503 or (method == "GET" and answer.status_code == 500)):
                break
            time.sleep(3)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    def answers(self) -> bool:
        """Whether Prefect's server has its database."""
        try:
            self.ask("GET", "/deployments/name/train-r1/train-r1")
        except httpx.HTTPStatusError:
            return False
        return True

    def start(self, deployment: str = "train-r1/train-r1", *sets: str, **parameters: Any) -> str:
        """Trigger a deployment as the form does; the id of its flow run."""
        found = self.ask("GET", f"/deployments/name/{deployment}")
        given = {"recipe": "tiny", "overrides": [*SMALLER, *sets], **parameters}
        # The form sends the deployment's values with what was changed.
        made = self.ask(
            "POST", f"/deployments/{found['id']}/create_flow_run", parameters={**found["parameters"], **given}
        )
        return made["id"]

    def start_stage(self, stage: str, **config: Any) -> str:
        """Trigger the deployment of a stage with its form's values and these settings; the id of its flow run."""
        found = self.ask("GET", f"/deployments/name/{stage}/{stage}")
        given = {**found["parameters"], "config": {**found["parameters"]["config"], **config}}
        return self.ask("POST", f"/deployments/{found['id']}/create_flow_run", parameters=given)["id"]

    def cancel(self, id: str) -> None:
        """As the button does."""
        self.ask("POST", f"/flow_runs/{id}/set_state", state={"type": "CANCELLING", "name": "Cancelling"})

    def runs(self, **wanted: Any) -> list[dict[str, Any]]:
        return self.ask("POST", "/flow_runs/filter", flow_runs=wanted or None, sort="START_TIME_ASC")

    def run(self, id: str) -> dict[str, Any]:
        return self.ask("GET", f"/flow_runs/{id}")

    def stage(self, name: str) -> list[dict[str, Any]]:
        """Flow runs of a stage that were dispatched, the oldest first."""
        found = [run for run in self.runs() if run["name"].split()[0] == name and run["deployment_id"]]
        return sorted(found, key=lambda run: run["created"])

    def tracked_runs(self, tag: str, value: str, experiment: str = "tiny") -> list[dict[str, Any]]:
        """The runs of an experiment with this tag, from MLflow's server."""
        url = f"http://127.0.0.1:{self.mlflow_port}/api/2.0/mlflow"
        found = httpx.get(f"{url}/experiments/get-by-name", params={"experiment_name": experiment}, timeout=120)
        asked = {"experiment_ids": [found.json()["experiment"]["experiment_id"]], "filter": f"tags.`{tag}` = '{value}'"}
        runs = httpx.post(f"{url}/runs/search", json=asked, timeout=120).json().get("runs", [])
        return [run["info"] for run in runs]

    def wait_for(self, id: str, *states: str) -> dict[str, Any]:
        def there() -> Any:
            try:
                run = self.run(id)
            except httpx.TransportError:  # a test that kills the server
                return None
            ended = run["state"]["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
            assert not ended or run["state"]["name"] in states or run["state"]["type"] == "CRASHED", run["state"]
            return run if run["state"]["name"] in states else None

        return self.wait(there, f"flow run {id} in {states}")

    def wait(self, found: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while not (value := found()):
            assert time.monotonic() < deadline, f"{what} did not come\n{self.logs()}"
            time.sleep(0.5)
        return value

    def process_of(self, run_id: str) -> int:
        """The process that runs a flow: the first with the run's id in its environment is its engine."""
        mark = f"PREFECT__FLOW_RUN_ID={run_id}".encode()

        def engines() -> list[int]:
            found = []
            for path in Path("/proc").glob("[0-9]*"):
                try:
                    command = (path / "cmdline").read_bytes()
                    if b"prefect.engine" in command and mark in (path / "environ").read_bytes().split(b"\0"):
                        found.append(int(path.name))
                except OSError:
                    continue
            return found

        return min(self.wait(engines, f"the process of flow run {run_id}"))

    def steps(self, stage: str) -> int:
        """Lines of metrics that the stage under way has written."""
        return sum(len(p.read_text().splitlines()) for p in self.home.glob(f"work/{stage}-*/trainer/metrics.jsonl"))

    def trainers(self) -> list[int]:
        """Processes of grpo/ that it runs."""
        found = []
        for pid in self.running():
            try:
                if b"grpo.train" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
            except OSError:
                continue
        return found

    def running(self) -> set[int]:
        """Processes that the installation started, however far down."""
        mark = f"R1FLOW_INSTALLATION={self.home}".encode()
        found = set()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (path / "environ").read_bytes().split(b"\0") and process_name(int(path.name)):
                    found.add(int(path.name))
            except OSError:
                continue
        return found - {os.getpid()}

    def assert_nothing_runs_without_a_process(self) -> None:
        """No flow run is Running, Pending or Cancelling that has no process."""
        live = [run for run in self.runs() if run["state"]["type"] in ("RUNNING", "PENDING", "CANCELLING")]
        assert {run["id"] for run in live if run["deployment_id"]} <= living()

    def down(self) -> None:
        done = self("down")
        assert done.returncode == 0, done.stderr[-2000:]
        assert not self.running()
        assert not (self.home / "up.json").exists()


def artifacts(home: Path) -> dict[str, str]:
    """stage/key/attempt -> digest."""
    found = {}
    for path in home.glob("artifacts/*/*/*/manifest.json"):
        found["/".join(path.parts[-4:-1])] = json.loads(path.read_text())["digest"]
    return found


@contextlib.contextmanager
def postgres_installation() -> Iterator[Installation]:
    """One that is to keep its records in Postgres. As root, Postgres runs as another user, who must reach the home:
    pytest's folders will not do, since every session of pytest that starts closes them to others."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Installation(Path(folder), "--postgres", "--postgres-port", str(free_port()))
