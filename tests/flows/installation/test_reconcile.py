"""`r1 deploy` against a real Prefect server, and what a worker, a schedule and an automation make of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prefect.blocks.core import Block
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from prefect.blocks.system import Secret
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.workers.process import ProcessJobConfiguration
from pydantic import SecretStr

from flows.installation.resources import form_values
from flows.recipe.load import load_recipe
from tasks.estimate.origin import code_version
from tests.support import prefect_server
from tests.support.prefect_server import Server
from tests.support.r1 import R1, ROOT

DEADLINE_S = 420.0
SMALL = ["problems.sources.0.count=120", "problems.sources.1.count=60"]
SERVICES = {"PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5", "PREFECT_UI_URL": "http://prefect.example"}

pytestmark = pytest.mark.slow


class StoreKeys(Block):
    """A block with fields, as those of an object store are."""

    access_key: SecretStr


def wait(found: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (value := found()):
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(1)
    return value


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("prefect"))
    with pytest.MonkeyPatch.context() as patched:
        for name, value in SERVICES.items():
            patched.setenv(name, value)
        patched.setattr(prefect_server, "DEADLINE_S", DEADLINE_S)
        server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> R1:
    return R1(tmp_path_factory.mktemp("home"))


def deploy(home: R1, server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**home.environment(), "PREFECT_API_URL": server.url}
    return subprocess.run(
        home.command("deploy", *arguments),
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.fixture(scope="module")
def deployed(server: Server, home: R1) -> Server:
    shown = deploy(home, server)
    assert shown.returncode == 1 and shown.stderr.strip() == "nothing was changed; --yes applies it"
    assert "create  deployment  train-r1/train-r1" in shown.stdout
    assert server.ask("POST", "/work_pools/filter") == []
    done = deploy(home, server, "--yes")
    assert done.returncode == 0, done.stderr
    return server


def deployment(server: Server, name: str) -> dict[str, Any]:
    flow, own = name.split("/")
    return server.ask("GET", f"/deployments/name/{flow}/{own}")


def patch(server: Server, path: str, **body: Any) -> None:
    def done() -> bool:
        try:
            server.ask("PATCH", path, **body)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 503:  # SQLite was locked; Prefect's own client tries again too
                raise
            return False
        return True

    wait(done, f"the server's answer to a change of {path}")


def start(server: Server, name: str, **parameters: Any) -> dict[str, Any]:
    """A run as the form in the UI makes it."""
    made = deployment(server, name)
    values = {**made["parameters"], **parameters}
    return server.ask("POST", f"/deployments/{made['id']}/create_flow_run", parameters=values)


def state(server: Server, run: dict[str, Any], *names: str) -> dict[str, Any] | None:
    found = server.ask("GET", f"/flow_runs/{run['id']}")
    return found if found["state"]["name"] in names else None


@contextlib.contextmanager
def worker(server: Server, home: R1, pool: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--limit", "1"]
    environment = {**home.environment(), "PREFECT_API_URL": server.url, "PREFECT_WORKER_QUERY_SECONDS": "2"}
    environment["PREFECT_HOME"] = str(home.home / "prefect")
    with log.open("ab") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """As if the machine lost its power: the worker, its flows and their trainers, whatever session they are in."""
    if process.poll() is None:
        everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for one in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)
        process.wait(timeout=30)


def test_a_second_call_has_nothing_to_change(deployed: Server, home: R1) -> None:
    again = deploy(home, deployed)
    assert again.returncode == 0 and again.stdout.splitlines()[-1] == "nothing to change", again.stdout


def test_what_was_changed_by_hand_is_shown_and_set_right_but_switches_and_defaults_stay(
    deployed: Server, home: R1
) -> None:
    weekly = deployment(deployed, "train-r1/train-r1-weekly")
    (schedule,) = weekly["schedules"]
    assert schedule["active"] is False
    patch(deployed, f"/deployments/{weekly['id']}/schedules/{schedule['id']}", active=True)
    template = deployed.ask("GET", "/work_pools/r1-gpu")["base_job_template"]
    template["variables"]["properties"]["cuda_visible_devices"]["default"] = "0,1"
    patch(deployed, "/work_pools/r1-gpu", base_job_template=template)
    assert deploy(home, deployed).stdout.splitlines()[-1] == "nothing to change"
    patch(deployed, f"/deployments/{weekly['id']}", description="mine")
    patch(deployed, "/work_pools/r1-gpu", description="ours")
    shown = deploy(home, deployed, "--yes")
    lines = [" ".join(line.split()) for line in shown.stdout.splitlines()]
    assert "change pool r1-gpu" in lines and "change deployment train-r1/train-r1-weekly" in lines
    assert 'description: "mine" -> "The whole paper recipe, on Saturdays."' in lines
    assert lines[-2].startswith("0 create, 2 change, ")
    (schedule,) = deployment(deployed, "train-r1/train-r1-weekly")["schedules"]
    assert schedule["active"] is True
    assert deployed.ask("GET", "/work_pools/r1-gpu")["base_job_template"] == template
    patch(deployed, f"/deployments/{weekly['id']}/schedules/{schedule['id']}", active=False)


def test_gpus_are_a_limit_and_credentials_a_reference_to_their_block(deployed: Server, home: R1) -> None:
    with temporary_settings({PREFECT_API_URL: deployed.url}):
        Secret(value="hunter2").save("hf-token")
        StoreKeys(access_key="key of the store").save("store")
    credentials = ("--credential", "HF_TOKEN=secret/hf-token", "--credential", "STORE_KEY=storekeys/store.access_key")
    arguments = ("--gpus", "2", *credentials)
    assert deploy(home, deployed, *arguments, "--yes").returncode == 0
    assert deployed.ask("GET", "/v2/concurrency_limits/r1-gpus")["limit"] == 2
    template = deployed.ask("GET", "/work_pools/r1-gpu")["base_job_template"]
    assert "hunter2" not in str(template) and "key of the store" not in str(template)
    with temporary_settings({PREFECT_API_URL: deployed.url}):
        made = asyncio.run(ProcessJobConfiguration.from_template_and_values(template, {}))
    assert (made.env["HF_TOKEN"], made.env["STORE_KEY"]) == ("hunter2", "key of the store")
    assert made.env["PREFECT_CLIENT_MAX_RETRIES"] == "20"
    for again in (arguments, ()):  # what a later call leaves out stays
        assert deploy(home, deployed, *again).stdout.splitlines()[-1] == "nothing to change"


def test_a_start_of_r1_up_keeps_what_people_have_changed(deployed: Server, home: R1) -> None:
    up = ("--yes", "--keep-changes", "--gpus", "4")  # as `r1 up` does on a machine with four GPUs
    (home.home / "up.json").write_text(json.dumps({"prefect": deployed.url}))
    assert deploy(home, deployed, *up).returncode == 0
    assert deploy(home, deployed, "--recipe", "qwen2.5-1.5b", "--yes").returncode == 0
    forms = deployment(deployed, "sft/sft")["parameters"]
    assert forms["config"] == form_values(load_recipe("qwen2.5-1.5b"))["flows.stage_flows.sft"]["config"]
    weekly, nightly = (deployment(deployed, f"train-r1/train-r1-{name}") for name in ("weekly", "nightly-evaluation"))
    hourly = {"interval": 3600, "anchor_date": "2026-01-01T00:00:00Z", "timezone": "UTC"}
    added = [{"schedule": hourly, "active": True, "parameters": {"seed": 7}}]  # as the UI adds one: without a name
    httpx.post(f"{deployed.url}/deployments/{weekly['id']}/schedules", json=added, timeout=60).raise_for_status()
    deployed.ask("DELETE", f"/deployments/{nightly['id']}/schedules/{nightly['schedules'][0]['id']}")
    patch(deployed, "/v2/concurrency_limits/r1-gpus", limit=3)
    patch(deployed, f"/deployments/{weekly['id']}", version="of an earlier r1flow", description="mine")
    lines = [" ".join(line.split()) for line in deploy(home, deployed, *up).stdout.splitlines()]
    assert [line for line in lines if line.startswith(("create", "change", "delete"))] == [
        "change deployment train-r1/train-r1-weekly"
    ]
    weekly = deployment(deployed, "train-r1/train-r1-weekly")
    assert (weekly["version"], weekly["description"]) == (code_version(), "mine")
    (own,) = [schedule for schedule in weekly["schedules"] if schedule["slug"] is None]
    assert (own["schedule"]["interval"], own["active"], own["parameters"]) == (3600, True, {"seed": 7})
    assert len(weekly["schedules"]) == 2
    assert deployment(deployed, "train-r1/train-r1-nightly-evaluation")["schedules"] == []
    assert deployed.ask("GET", "/v2/concurrency_limits/r1-gpus")["limit"] == 3
    assert deployment(deployed, "sft/sft")["parameters"] == forms
    # `r1 deploy` sets everything right, and the next start goes on from there.
    assert deploy(home, deployed, "--gpus", "2", "--yes").returncode == 0
    assert deploy(home, deployed, *up).stdout.splitlines()[-1] == "nothing to change"
    assert len(deployment(deployed, "train-r1/train-r1-weekly")["schedules"]) == 1
    (home.home / "up.json").unlink()


@contextlib.contextmanager
def chat() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A team's chat: an address, and the messages that were posted to it."""
    messages: list[dict[str, Any]] = []

    class Posts(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Posts) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", messages
        server.shutdown()


def test_a_recipe_that_fails_is_told_through_the_block(deployed: Server, home: R1) -> None:
    with chat() as (address, messages):
        content = {"title": "{{subject}}", "text": "{{body}}"}
        with temporary_settings({PREFECT_API_URL: deployed.url}):
            CustomWebhookNotificationBlock(name="team", url=address, json_data=content).save("team")
        assert deploy(home, deployed, "--notify", "custom-webhook/team", "--yes").returncode == 0
        stage, recipe = start(deployed, "base/base"), start(deployed, "train-r1/train-r1")
        for run in (stage, recipe):  # of a stage nothing is said: its recipe fails too
            failed = {"type": "FAILED", "name": "Failed", "message": "base failed: disk full"}
            deployed.ask("POST", f"/flow_runs/{run['id']}/set_state", state=failed, force=True)
        wait(lambda: messages, "the message")
    for run in (stage, recipe):
        deployed.ask("DELETE", f"/flow_runs/{run['id']}")
    (message,) = messages
    assert message["title"] == f"{recipe['name']} Failed"
    assert message["text"].strip().splitlines() == [
        f"train-r1, run {recipe['name']}: Failed.",
        "base failed: disk full",
        f"http://prefect.example/runs/flow-run/{recipe['id']}",
    ]


def test_deployments_of_an_earlier_version_go_and_their_schedules_stay_switched_on(deployed: Server, home: R1) -> None:
    now = deployment(deployed, "train-r1/train-r1-weekly")
    weekly = {"schedule": {"cron": "0 3 * * 6"}, "slug": "weekly", "active": True}
    for name, schedules in (("weekly", [weekly]), ("r1flow", [])):
        body = {"name": name, "flow_id": now["flow_id"], "tags": ["r1flow"], "schedules": schedules}
        deployed.ask("POST", "/deployments/", **body, entrypoint="flows.pipelines.train_r1")
    mine = deployed.ask("POST", "/deployments/", name="r1flow", flow_id=deployment(deployed, "sft/sft")["flow_id"])
    deployed.ask("DELETE", f"/deployments/{now['id']}")
    lines = [" ".join(line.split()) for line in deploy(home, deployed, "--yes").stdout.splitlines()]
    assert {"delete deployment train-r1/weekly", "delete deployment train-r1/r1flow"} <= set(lines)
    assert "1 create, 0 change, 2 delete" in lines[-2]
    (schedule,) = deployment(deployed, "train-r1/train-r1-weekly")["schedules"]
    assert schedule["active"] is True
    assert deployed.ask("GET", f"/deployments/{mine['id']}")["name"] == "r1flow"  # without our tag it is somebody's own
    deployed.ask("DELETE", f"/deployments/{mine['id']}")
    made = deployment(deployed, "train-r1/train-r1-weekly")
    patch(deployed, f"/deployments/{made['id']}/schedules/{schedule['id']}", active=False)
    assert deploy(home, deployed).stdout.splitlines()[-1] == "nothing to change"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pools", "docker"], "work pool 'r1-cpu' exists and is of type process; give --pools process"),
        (["--notify", "slack-webhook/none"], "the server has no such block"),
        (["--notify", "team"], "write TYPE/NAME"),
        (["--credential", "HF_TOKEN=secret/none"], "--credential secret/none: the server has no such block"),
        (["--credential", "HF_TOKEN"], "write NAME=TYPE/BLOCK"),
        (["--gpus", "0"], "give 1 or more"),
        (["--recipe", "tinny"], "did you mean 'tiny'?"),
    ],
)
def test_what_cannot_be_done_is_one_line(deployed: Server, home: R1, arguments: list[str], said: str) -> None:
    done = deploy(home, deployed, *arguments, "--yes")
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_a_form_with_a_bad_value_starts_nothing(deployed: Server) -> None:
    sft = deployment(deployed, "sft/sft")["parameters"]["config"]
    for name, bad, said in [
        ("train-r1/train-r1", {"seed": -1}, "minimum of 0"),
        ("train-r1/train-r1", {"overrides": ["seed"]}, "does not match"),
        ("sft/sft", {"config": {**sft, "epochs": 0}}, "minimum of 1"),
        ("sft/sft", {"config": {**sft, "epoch": 1}}, "epoch"),
    ]:
        with pytest.raises(httpx.HTTPStatusError) as refused:
            start(deployed, name, **bad)
        assert 400 <= refused.value.response.status_code < 500 and said in refused.value.response.text
    assert deployed.ask("POST", "/flow_runs/count") == 0


def everything(server: Server) -> dict[str, dict[str, Any]]:
    """All deployments as the server has them, but for when they were changed, and what a worker last said."""
    changing = {"id", "created", "updated", "version_id", "version_info", "branch", "status", "last_polled"}

    def settled(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: settled(inner) for name, inner in value.items() if name not in changing}
        return [settled(inner) for inner in value] if isinstance(value, list) else value

    return {made["name"]: settled(made) for made in server.ask("POST", "/deployments/filter")}


def test_prefects_own_command_registers_the_same_but_for_parameters_that_a_flow_lacks(
    deployed: Server, home: R1, tmp_path: Path
) -> None:
    assert deploy(home, deployed, "--yes").returncode == 0
    ours = everything(deployed)
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    command += ["--prefect-file", str(ROOT / "deployments" / "prefect.yaml")]
    environment = {**home.environment(), "PREFECT_API_URL": deployed.url, "PREFECT_HOME": str(home.home / "prefect")}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    theirs = everything(deployed)
    for made in ours.values():  # Prefect's command takes no rule for the whole form
        assert made["parameter_openapi_schema"].pop("additionalProperties") is False
    assert theirs == ours
    made = deployment(deployed, "train-r1/train-r1")
    assert not made["pull_steps"] and not made["path"]
    assert deploy(home, deployed, "--yes").returncode == 0
    for made in everything(deployed).values():
        assert made["parameter_openapi_schema"].pop("additionalProperties") is False
        assert made == ours[made["name"]]
    assert deploy(home, deployed).stdout.splitlines()[-1] == "nothing to change"


def test_a_stage_started_from_its_form_runs_on_its_pool(deployed: Server, home: R1, tmp_path: Path) -> None:
    config = deployment(deployed, "problems/problems")["parameters"]["config"]
    for source in config["sources"]:
        source["count"] = 60
    run = start(deployed, "problems/problems", config=config)
    with worker(deployed, home, "r1-tasks", tmp_path / "worker.log"):
        done = wait(lambda: state(deployed, run, "Completed", "Failed", "Crashed"), "the end of the run")
    assert done["state"]["name"] == "Completed", (tmp_path / "worker.log").read_text()[-3000:]
    assert (done["work_pool_name"], done["work_queue_name"]) == ("r1-tasks", "interactive")
    assert len(list(home.home.glob("artifacts/problems/*/*"))) == 1


def test_a_schedule_that_is_switched_on_fires_and_runs(deployed: Server, home: R1, tmp_path: Path) -> None:
    nightly = deployment(deployed, "train-r1/train-r1-nightly-evaluation")
    (schedule,) = nightly["schedules"]
    parameters = {"recipe": "tiny", "overrides": SMALL, "only": "problems", "dispatch": False}
    every_minute = {"cron": "* * * * *", "timezone": "UTC"}
    place = f"/deployments/{nightly['id']}/schedules/{schedule['id']}"
    patch(deployed, place, schedule=every_minute, parameters=parameters, active=True)

    def fired() -> dict[str, Any] | None:
        of_it = {"id": {"any_": [nightly["id"]]}}
        runs = deployed.ask("POST", "/flow_runs/filter", deployments=of_it)
        return next((r for r in runs if r["state"]["name"] in ("Completed", "Failed", "Crashed")), None)

    with worker(deployed, home, "r1-cpu", tmp_path / "worker.log"):
        done = wait(fired, "a run of the schedule")
    patch(deployed, place, active=False)
    assert done["state"]["name"] == "Completed", (tmp_path / "worker.log").read_text()[-3000:]
    assert done["auto_scheduled"] and done["work_queue_name"] == "scheduled"


def test_a_machine_that_is_gone_is_noticed_and_its_run_crashed(deployed: Server, home: R1, tmp_path: Path) -> None:
    run = start(deployed, "base/base")
    with worker(deployed, home, "r1-gpu", tmp_path / "worker.log") as process:
        wait(lambda: state(deployed, run, "Running"), "the run")
        of_it = {"filter": {"event": {"name": ["prefect.flow-run.heartbeat"]}}}
        wait(lambda: deployed.ask("POST", "/events/filter", **of_it)["total"], "a heartbeat")
        end(process)
    gone = wait(lambda: state(deployed, run, "Crashed"), "the automation")
    assert gone["state"]["message"] == "No heartbeat for 90 s. The machine or the process is gone."


def test_a_server_that_is_not_there_is_one_line(home: R1) -> None:
    environment = {**home.environment(), "PREFECT_API_URL": "http://127.0.0.1:9/api"}
    done = subprocess.run(home.command("deploy"), env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: http://127.0.0.1:9/api: no Prefect server answers") and "PREFECT_API_URL" in line
    without = {k: v for k, v in environment.items() if k != "PREFECT_API_URL"}
    done = subprocess.run(home.command("deploy"), env=without, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "no Prefect server is named" in done.stderr
