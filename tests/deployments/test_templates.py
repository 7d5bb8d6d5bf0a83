"""The pools' templates as the workers render them, held against the types of Docker's and Kubernetes' APIs."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
from copy import deepcopy
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any

import docker
import pytest
import yaml
from docker.models.containers import _create_container_args
from prefect.client.schemas.objects import FlowRun
from prefect.utilities.schema_tools import validate
from prefect.workers.process import ProcessJobConfiguration
from prefect_docker.worker import DockerWorker, DockerWorkerJobConfiguration
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

from flows.home import LOGGERS
from flows.installation import kubernetes_node
from flows.installation.resources import FOLDER, desired
from flows.installation.slurm.job import SlurmJobConfiguration
from tests.support.kubernetes_types import faults

CONFIGURATIONS: dict[str, Any] = {
    "process": ProcessJobConfiguration,
    "docker": DockerWorkerJobConfiguration,
    "kubernetes": KubernetesWorkerJobConfiguration,
    "slurm": SlurmJobConfiguration,
}
ELSEWHERE = "http://prefect.example:4200/api"


@cache
def pools(kind: str) -> dict[str, Any]:
    """Pool -> its job template."""
    return {
        resource.name: resource.fields["base_job_template"] for resource in desired(kind) if resource.kind == "pool"
    }


def render(kind: str, pool: str, **values: Any) -> Any:
    """The configuration of a job, as the pool's worker makes it for a flow run with these job variables."""
    values["env"] = {**values.get("env", {}), "PREFECT_API_URL": ELSEWHERE}
    made = asyncio.run(CONFIGURATIONS[kind].from_template_and_values(deepcopy(pools(kind)[pool]), values))
    made.prepare_for_flow_run(FlowRun(name="calm-otter", flow_id="00000000-0000-0000-0000-000000000001"))
    return made


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_every_variable_is_used_and_explained(kind: str) -> None:
    """Prefect ignores silently what a template does not refer to; `env` it merges by itself."""
    read = yaml.safe_load((FOLDER / "pools" / f"{kind}.yaml").read_text())["template"]
    used = set(re.findall(r"{{ (\w+) }}", str(read["job_configuration"])))
    variables = read["variables"]["properties"]
    assert used | {"env"} == set(variables)
    assert all(values["description"] and values["title"] for values in variables.values())


@pytest.mark.system
def test_a_process_has_the_gpus_that_its_run_names() -> None:
    named = render("process", "r1-gpu", cuda_visible_devices="2,3", env={"MINE": "1"})
    assert (named.env["CUDA_VISIBLE_DEVICES"], named.env["MINE"]) == ("2,3", "1")
    assert named.working_dir is None


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_lines_of_ours_reach_the_logs_of_a_run(kind: str) -> None:
    env = render(kind, "r1-tasks", env={"MINE": "1"}).env
    assert (env["PREFECT_LOGGING_EXTRA_LOGGERS"], env["MINE"]) == (LOGGERS, "1")
    assert env["PREFECT_CLIENT_MAX_RETRIES"] == "20"  # of the variable `env`
    # Not of it: people replace it, and then the automation would take each run for lost.
    assert env["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "30"
    read = yaml.safe_load((FOLDER / "pools" / f"{kind}.yaml").read_text())["template"]["variables"]["properties"]
    assert "PREFECT_FLOWS_HEARTBEAT_FREQUENCY" not in read["env"]["default"]


def test_a_process_has_else_the_gpus_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert render("process", "r1-gpu").env["CUDA_VISIBLE_DEVICES"] == "5"


def container(pool: str, **values: Any) -> dict[str, Any]:
    """The worker's arguments to Docker's API, in its types; names that docker does not know raise."""
    configuration = render("docker", pool, **values)
    unconnected = docker.DockerClient(base_url="tcp://127.0.0.1:1", version="1.47")
    settings = DockerWorker._build_container_settings(None, unconnected, configuration)  # type: ignore[arg-type]
    return _create_container_args({**settings, "version": "1.47"})


def test_a_docker_container_has_gpus_shared_memory_and_both_volumes() -> None:
    made = container("r1-gpu", store="/srv/r1flow", image="here/r1flow:1")
    host = made["host_config"]
    assert made["image"] == "here/r1flow:1" and made["name"] == "calm-otter"
    assert host["ShmSize"] == 16 * 1024**3 and host["Init"] is True and host["AutoRemove"] is True
    (gpus,) = host["DeviceRequests"]
    assert (gpus["Driver"], gpus["Count"], gpus["Capabilities"]) == ("nvidia", -1, [["gpu"]])
    assert host["Binds"] == ["/srv/r1flow:/data/r1flow", "r1flow-cache:/data/cache"]


def test_a_docker_container_has_the_security_options_of_its_pool() -> None:
    assert not container("r1-gpu")["host_config"].get("SecurityOpt")
    (options,) = re.findall(r"`security_opt` to `(\[.+?\])`", (FOLDER / "README.md").read_text())
    asked = json.loads(options)
    assert container("r1-gpu", security_opt=asked)["host_config"]["SecurityOpt"] == asked
    assert asked == ["seccomp=unconfined", "apparmor=unconfined"]


def test_a_docker_container_of_a_pool_without_gpus_has_none() -> None:
    for pool in ("r1-cpu", "r1-tasks"):
        host = container(pool, mem_limit="4g", networks=["r1"])["host_config"]
        assert not host.get("DeviceRequests")
        assert (host["Memory"], host["NetworkMode"]) == (4 * 1024**3, "r1")


def job(pool: str, **values: Any) -> dict[str, Any]:
    """The Kubernetes job, less two fields that Prefect's worker wants in the pod, where Kubernetes has none."""
    manifest = render("kubernetes", pool, **values).job_manifest
    for name in ("parallelism", "completions"):
        del manifest["spec"]["template"]["spec"][name]
    return manifest


EVERYTHING = {
    "namespace": "training",
    "image": "registry.example/r1flow:1",
    "image_pull_secrets": [{"name": "registry"}],
    "labels": {"team": "rl", "kueue.x-k8s.io/queue-name": "training"},
    "gpus": 8,
    "cpu": "500m",
    "memory": "1Ti",
    "shm_size": "64Gi",
    "node_selector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
    "tolerations": [{"key": "spot", "operator": "Exists", "effect": "NoSchedule", "tolerationSeconds": 5}],
    "termination_grace_s": 600,
    "secret": "keys",
    "env": {"MLFLOW_TRACKING_URI": "http://mlflow:5000"},
    "annotations": {"kueue.x-k8s.io/podset-required-topology": "rack"},
    "nodes": 4,
    "security_context": {"seccompProfile": {"type": "Unconfined"}, "appArmorProfile": {"type": "Unconfined"}},
}


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["defaults", "everything"])
@pytest.mark.parametrize("pool", ["r1-cpu", "r1-tasks", "r1-gpu"])
def test_a_kubernetes_job_is_one_that_the_schema_knows(pool: str, values: dict[str, Any]) -> None:
    assert faults(job(pool, **values), "V1Job") == []


def test_the_check_against_the_schema_finds_what_is_wrong() -> None:
    made = job("r1-gpu")
    made["spec"]["backoffLimit"] = "0"
    pod = made["spec"]["template"]["spec"]
    pod["nodeSelectors"] = {}
    pod["containers"][0]["volumeMounts"][0].pop("mountPath")
    found = "; ".join(faults(made, "V1Job"))
    assert "spec.backoffLimit: '0' is no int" in found
    assert "spec.template.spec.nodeSelectors: unknown" in found
    assert "spec.template.spec.containers.0.volumeMounts.0: `mount_path`" in found.replace("Invalid value for ", "")


def test_a_kubernetes_job_has_what_was_asked_for() -> None:
    made = job("r1-gpu", **EVERYTHING)
    pod = made["spec"]["template"]["spec"]
    (box,) = pod["containers"]
    assert made["metadata"]["namespace"] == "training" and made["metadata"]["generateName"] == "calm-otter-"
    assert box["resources"]["limits"] == {"memory": "1Ti", "nvidia.com/gpu": 8}
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert pod["volumes"][2] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}
    assert [mount["mountPath"] for mount in box["volumeMounts"]] == ["/data/r1flow", "/data/cache", "/dev/shm"]
    assert box["securityContext"] == EVERYTHING["security_context"]
    assert f"`{json.dumps(EVERYTHING['security_context'])}`" in (FOLDER / "README.md").read_text()
    environment = {entry["name"]: entry["value"] for entry in box["env"]}
    assert environment["MLFLOW_TRACKING_URI"] == "http://mlflow:5000" and environment["PREFECT_API_URL"] == ELSEWHERE
    assert pod["terminationGracePeriodSeconds"] == 600


def test_a_kubernetes_job_has_a_pod_for_each_node() -> None:
    one, four = job("r1-gpu"), job("r1-gpu", **EVERYTHING)
    for made, pods in ((one, 1), (four, 4)):
        spec = made["spec"]
        assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", pods, pods)
        (box,) = spec["template"]["spec"]["containers"]
        assert {"name": "R1FLOW_PODS", "value": str(pods)} in box["env"]
        assert box["args"][:3] == ["python", "-m", kubernetes_node.__name__]
        assert shlex.join(box["args"][3:]) == KubernetesWorkerJobConfiguration._base_flow_run_command()
    # Kueue reads its queue on the job; a Job without the label passes it by.
    assert EVERYTHING["labels"].items() <= four["metadata"]["labels"].items()
    assert "kueue.x-k8s.io/queue-name" not in one["metadata"]["labels"]
    assert four["metadata"]["annotations"] == EVERYTHING["annotations"]
    assert EVERYTHING["annotations"].items() <= four["spec"]["template"]["metadata"]["annotations"].items()
    service = yaml.safe_load(dedent(heredocs()[2]))
    assert faults(service, "V1Service") == []
    assert service["metadata"]["name"] == four["spec"]["template"]["spec"]["subdomain"] == kubernetes_node.SERVICE
    assert service["spec"]["selector"].items() <= four["spec"]["template"]["metadata"]["labels"].items()


def heredocs() -> list[str]:
    """The manifests in deployments/README.md."""
    readme = (FOLDER / "README.md").read_text()
    return re.findall(r"apply --filename - <<'EOF'\n(.*?)\n *EOF", readme, re.DOTALL)


def test_an_evicted_pod_is_scheduled_anew_by_prefect_alone() -> None:
    """backoffLimit 0 is what makes Prefect's worker ask for that."""
    made = job("r1-gpu")
    (box,) = made["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in box["env"]}
    assert made["spec"]["backoffLimit"] == 0
    assert environment["PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"] == "reschedule"
    assert made["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 30  # what Prefect takes


def test_parents_and_light_stages_ask_for_no_gpu() -> None:
    for pool in ("r1-cpu", "r1-tasks"):
        (box,) = job(pool)["spec"]["template"]["spec"]["containers"]
        assert box["resources"]["limits"]["nvidia.com/gpu"] == 0


def test_the_readme_makes_the_volumes_and_the_secret_that_jobs_ask_for() -> None:
    readme = (FOLDER / "README.md").read_text()
    claims = [*yaml.safe_load_all(dedent(heredocs()[0]))]
    assert [fault for claim in claims for fault in faults(claim, "V1PersistentVolumeClaim")] == []
    spec = render("kubernetes", "r1-gpu").job_manifest["spec"]["template"]["spec"]
    asked = {v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v}
    assert {claim["metadata"]["name"] for claim in claims} == asked
    chown = yaml.safe_load(dedent(heredocs()[1]))
    assert faults(chown, "V1Pod") == []
    assert {v["persistentVolumeClaim"]["claimName"] for v in chown["spec"]["volumes"]} == asked
    assert chown["spec"]["containers"][0]["command"][1] == str(spec["securityContext"]["fsGroup"])
    (secret,) = [source["secretRef"]["name"] for source in spec["containers"][0]["envFrom"]]
    assert f"create secret generic {secret} " in readme
    names = ("r1-cpu", "r1-tasks", "r1-gpu")
    assert {render("kubernetes", name).namespace for name in names} == {"r1flow"}
    assert "kubectl create namespace r1flow\n" in readme


def test_a_slurm_job_has_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("R1FLOW_HOME", "/shared/r1flow")
    assert render("slurm", "r1-gpu", time="", partition="h100", options=["--exclusive"]).options_of_sbatch() == [
        "--job-name=calm-otter",
        "--partition=h100",
        "--nodes=1",
        "--gres=gpu:1",
        "--cpus-per-task=8",
        "--output=/shared/r1flow/logs/slurm/%j.log",
        "--open-mode=append",
        "--chdir=/shared/r1flow",
        "--signal=B:USR1@120",
        "--requeue",
        "--exclusive",
    ]
    assert not [option for option in render("slurm", "r1-cpu").options_of_sbatch() if option.startswith("--gres")]


SLURM = (FOLDER.parent / "docs" / "slurm.md").read_text()


def test_the_page_of_slurm_has_the_pools_defaults() -> None:
    cpus = {pool: render("slurm", pool).cpus for pool in ("r1-gpu", "r1-tasks", "r1-cpu")}
    assert f"| {', '.join(f'{number} in `{pool}`' for pool, number in cpus.items())} |" in SLURM


def test_a_time_limit_is_text_for_the_pool() -> None:
    """Prefect's command reads `time=90` as a number; its forms know no field that is text or a number."""
    variables = pools("slurm")["r1-gpu"]["variables"]
    (right, wrong) = re.findall(r"`time=(\S+)`", SLURM)
    assert validate({"time": right}, variables) == [] and len(validate({"time": json.loads(wrong)}, variables)) == 1
    assert render("slurm", "r1-gpu", time=right).options_of_sbatch()[1] == "--time=01:30:00"


def test_a_stage_on_several_nodes_has_its_jobs_from_prefect_yaml(tmp_path: Path) -> None:
    """The example of docs/slurm.md, in the place of the stage's own entry."""
    (example,) = re.findall(r"^```yaml\n(.*?)^```$", SLURM, re.DOTALL | re.MULTILINE)
    shutil.copytree(FOLDER, tmp_path / "deployments")
    file = tmp_path / "deployments" / "prefect.yaml"
    text, count = re.subn(
        r"^  - <<: \*heavy\n    name: reasoning_rl\n(    .*\n)+", example, file.read_text(), flags=re.M
    )
    assert count == 1
    file.write_text(text)
    changed = {r.name: r.fields for r in desired("slurm", folder=file.parent) if r.kind == "deployment"}
    usual = {r.name: r.fields for r in desired("slurm") if r.kind == "deployment"}
    assert [name for name in usual if usual[name] != changed[name]] == ["reasoning_rl/reasoning_rl"]
    stage = changed["reasoning_rl/reasoning_rl"]
    assert {**stage, "job_variables": {}} == usual["reasoning_rl/reasoning_rl"]
    made = render("slurm", stage["work_pool_name"], **stage["job_variables"])
    assert (made.nodes, made.gpus) == (2, 8)
