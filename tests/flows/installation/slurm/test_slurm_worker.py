"""What Slurm prints, the options and the script of a job, and what the state of a job means for its flow run."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.schemas.objects import FlowRun, StateType

from flows.installation.slurm.job import GAVE_UP, NOT_REQUEUED, SlurmJobConfiguration
from flows.installation.slurm.outcome import outcome
from flows.installation.slurm.queue import SlurmJob, parse_accounting, parse_queue
from grpo.errors import InputError

RUN = UUID("8d5c3a0e-5a43-4b0e-9a53-0d7d3bb1f001")
FLOW = "00000000-0000-0000-0000-000000000001"
LOG = Path("/logs/5.log")


def column(*values: object) -> str:
    widths = (20, 20, 12, 8, 60, 60, 80)
    return "".join(f"{value!s:<{width}}" for value, width in zip(values, widths, strict=True))


# Recorded from squeue 22.05.8 with `queue_command`, except for the ids of the flow runs.
SQUEUE = "\n".join(
    [
        column(2, "CANCELLED", 768, 0, "n0", "None", "bbb"),
        column(4, "FAILED", 1, 0, "", "BadConstraints", "(null)"),
        column(5, "FAILED", 1792, 0, "n0", "NonZeroExitCode", f"r1flow:{RUN}"),
        column(1, "PENDING", 0, 2, "", "BeginTime", f"r1flow:{RUN}"),
        column(7, "RUNNING", 0, 0, "n1", "None", "r1flow:no id"),
        "",
    ]
)


def test_squeue_is_parsed() -> None:
    assert parse_queue(SQUEUE) == [
        SlurmJob(2, "CANCELLED", "None", exit_code=3, nodes="n0"),
        SlurmJob(4, "FAILED", "BadConstraints", signal=1),
        SlurmJob(5, "FAILED", "NonZeroExitCode", exit_code=7, nodes="n0", run_id=RUN),
        SlurmJob(1, "PENDING", "BeginTime", restarts=2, run_id=RUN),
        SlurmJob(7, "RUNNING", "None", nodes="n1"),
    ]


def test_sacct_is_parsed() -> None:
    assert parse_accounting(5, "FAILED|7:0\n") == SlurmJob(5, "FAILED", exit_code=7)
    assert parse_accounting(6, "CANCELLED by 1000|0:15\n") == SlurmJob(6, "CANCELLED", signal=15)
    assert parse_accounting(7, "") is None


def configuration(**values: Any) -> SlurmJobConfiguration:
    made = SlurmJobConfiguration(**values)
    made.prepare_for_flow_run(FlowRun(id=RUN, name="calm-otter", flow_id=FLOW))
    return made


def test_options_of_sbatch() -> None:
    made = configuration(
        partition="gpu", time="1-00:00:00", gpus=4, cpus=32, memory="200G", log_folder="/l%/x", options=["--exclusive"]
    )
    assert [option for option in made.options_of_sbatch() if not option.startswith("--chdir")] == [
        "--job-name=calm-otter",
        "--partition=gpu",
        "--time=1-00:00:00",
        "--nodes=1",
        "--gres=gpu:4",
        "--cpus-per-task=32",
        "--mem=200G",
        "--output=/l%%/x/%j.log",
        "--open-mode=append",
        "--signal=B:USR1@120",
        "--requeue",
        "--exclusive",
    ]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"time": "3 days"}, "time '3 days': write minutes, HH:MM:SS or DAYS-HH:MM:SS, for example 1-00:00:00"),
        ({"options": ["rm -rf /"]}, "options 'rm -rf /': write each one as --name=value or --name"),
        ({"options": ["--wrap=id"]}, "options '--wrap=id': the worker sets this itself; remove it"),
        ({"partition": "a\n#SBATCH --uid=0"}, "--partition: a value must be one line"),
        ({"log_folder": "logs"}, "log_folder 'logs': give an absolute path that all nodes see"),
    ],
)
def test_a_wrong_setting_is_one_line(values: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as refused:
        configuration(**values).options_of_sbatch()
    assert str(refused.value) == line


def test_an_allocation_of_the_worker_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_CONF", "SLURM_MEM_PER_NODE", "SBATCH_ACCOUNT"):
        monkeypatch.setenv(name, "1")
    environment = configuration().environment()
    assert [name for name in sorted(environment) if name.startswith(("SLURM", "SBATCH"))] == [
        "SBATCH_ACCOUNT",
        "SLURM_CONF",
    ]


def test_no_value_of_a_user_is_in_the_script() -> None:
    made = configuration(
        env={"HF_TOKEN": "hf_secret$(id)"}, partition="$(id)", memory="`id`", name="a'b$(id)", python="/opt/my python"
    )
    script = made.script()
    assert "id)" not in script and "`id`" not in script and "hf_" not in script
    assert "\n'/opt/my python' -m prefect flow-run execute &\n" in script
    assert made.environment()["HF_TOKEN"] == "hf_secret$(id)"
    assert made.environment()["PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"] == "reschedule"
    assert "--job-name=a_b__id_" in made.options_of_sbatch()


FLOW_RUN = "trap 'sleep 0.2; touch stopped; exit 0' TERM; touch up; while :; do sleep 0.1; done"


def run_script(folder: Path, number: int, restarts: int = 0, **values: Any) -> tuple[int, str]:
    """Exit code of the script that gets this signal, and what it asked `scontrol`. The flow is another shell script."""
    (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\nexit 1\n')
    (folder / "scontrol").chmod(0o755)
    (folder / "flow.sh").write_text(FLOW_RUN)
    script = configuration(command=f"bash {folder}/flow.sh", **values).script()
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": str(restarts)}
    process = subprocess.Popen(["bash", "-c", script], cwd=folder, env={**os.environ, **own})
    deadline = time.monotonic() + 60
    while not (folder / "up").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    code = process.wait(timeout=60)
    assert (folder / "stopped").exists()  # it waited until the flow had stopped
    asked = folder / "asked"
    return code, asked.read_text() if asked.exists() else ""


def test_the_script_stops_the_flow_before_the_time_limit_and_requeues_the_job(tmp_path: Path) -> None:
    assert run_script(tmp_path, signal.SIGUSR1) == (NOT_REQUEUED, "requeue 5\n")  # this scontrol refuses


def test_the_script_does_not_requeue_for_ever(tmp_path: Path) -> None:
    assert run_script(tmp_path, signal.SIGUSR1, restarts=3, max_requeues=3) == (GAVE_UP, "")


def test_the_script_leaves_the_requeue_to_the_worker(tmp_path: Path) -> None:
    assert run_script(tmp_path, signal.SIGUSR1, requeue=False) == (NOT_REQUEUED, "")


def test_the_script_passes_a_sigterm_on(tmp_path: Path) -> None:
    assert run_script(tmp_path, signal.SIGTERM) == (0, "")


def test_several_machines_take_part_in_one_flow_run(tmp_path: Path) -> None:
    """srun starts one process on each of the others, with its number; the flow runs here with number 0."""
    programs = {"srun": 'shift 5; SLURM_PROCID=1 exec "$@"', "python": 'echo "$PET_NODE_RANK $*" >> asked'}
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    made = configuration(nodes=3, python=str(tmp_path / "python"))
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "10007"}
    done = subprocess.run(["bash", "-c", f"{made.script()}"], cwd=tmp_path, env={**os.environ, **own}, text=True)
    assert done.returncode == 0
    deadline = time.monotonic() + 60
    while len(lines := (tmp_path / "asked").read_text().splitlines()) < 2:  # the other machine may be later
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert sorted(lines) == [
        f"0 -m flows.installation.node {tmp_path / 'python'} -m prefect flow-run execute",
        "2 -m flows.installation.node",
    ]
    assert "srun --nodes=2 --ntasks=2 --relative=1 " in made.script()
    assert "srun" not in configuration().script()


def test_the_script_has_the_exit_code_of_its_flow() -> None:
    script = configuration(command="bash -c 'exit 7'", setup="export A=1").script()
    assert subprocess.run(["bash", "-c", script]).returncode == 7


S = StateType
CASES = [
    # state of the job, further fields, state of the flow run, action, part of the message
    ("PENDING", {}, S.PENDING, "wait", ""),
    ("RUNNING", {}, S.RUNNING, "wait", ""),
    ("COMPLETING", {}, S.COMPLETED, "wait", ""),
    ("PENDING", {"restarts": 1, "reason": "BeginTime"}, S.RUNNING, "again", "queued job 5 again (BeginTime)"),
    ("PENDING", {"restarts": 1}, S.SCHEDULED, "wait", ""),
    ("PENDING", {"restarts": 1}, S.COMPLETED, "scancel", "removed from the queue"),
    ("PENDING", {}, S.CANCELLING, "scancel", "removed from the queue"),
    ("COMPLETED", {}, S.COMPLETED, "done", ""),
    ("COMPLETED", {}, S.PAUSED, "done", ""),  # a gate asks: the run is resumed in another job
    ("COMPLETED", {}, S.SCHEDULED, "done", ""),
    ("COMPLETED", {}, S.RUNNING, "crashed", "ended (COMPLETED, exit code 0), and its flow run did not. /logs/5.log"),
    ("FAILED", {"exit_code": 7}, S.PENDING, "crashed", "exit code 7"),
    ("FAILED", {"signal": 9}, S.RUNNING, "crashed", "signal 9"),
    ("FAILED", {"exit_code": NOT_REQUEUED}, S.RUNNING, "again", "stopped for its time limit"),
    ("FAILED", {"exit_code": GAVE_UP}, S.SCHEDULED, "crashed", "raise the variable time"),
    ("CANCELLED", {}, S.RUNNING, "cancelled", "with scancel"),
    ("CANCELLED", {}, S.SCHEDULED, "cancelled", "with scancel"),
    ("CANCELLED", {}, S.FAILED, "done", ""),
    ("FAILED", {}, S.CANCELLING, "cancelled", "was cancelled"),
    ("NODE_FAIL", {"nodes": "n7"}, S.RUNNING, "again", "on n7 lost its node"),
    ("PREEMPTED", {}, S.RUNNING, "again", "was preempted"),
    ("OUT_OF_MEMORY", {}, S.RUNNING, "crashed", "raise the variable memory"),
    ("TIMEOUT", {}, S.RUNNING, "crashed", "before it had stopped"),
    ("UNKNOWN", {}, S.RUNNING, "crashed", "no longer known to Slurm"),
    ("UNKNOWN", {}, S.COMPLETED, "done", ""),
]


@pytest.mark.parametrize(("state", "fields", "run_state", "action", "part"), CASES)
def test_what_the_state_of_a_job_means(
    state: str, fields: dict[str, Any], run_state: StateType, action: str, part: str
) -> None:
    result = outcome(SlurmJob(5, state, **fields), run_state, cancelling_s=None, ended_s=None, log=LOG)
    assert result.action == action
    assert part in result.message


def test_a_job_that_outlives_its_flow_run_is_cancelled() -> None:
    def action(run_state: StateType, **seconds: float | None) -> str:
        ages = {"cancelling_s": None, "ended_s": None, **seconds}
        return outcome(SlurmJob(5, "RUNNING"), run_state, log=LOG, **ages).action

    assert action(S.CANCELLING, cancelling_s=60) == "wait"
    assert action(S.CANCELLING, cancelling_s=100) == "scancel"
    assert action(S.COMPLETED, ended_s=100) == "wait"
    assert action(S.COMPLETED, ended_s=400) == "scancel"
