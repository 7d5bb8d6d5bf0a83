"""The job of a flow run: its settings, the options of `sbatch`, and the batch script."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect.workers.base import BaseJobConfiguration
from pydantic import Field, field_validator

from flows.home import home
from grpo.errors import InputError
from tasks.paths import expanded

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

GAVE_UP = 76
"""Exit code of the script of a job that ran into its time limit `max_requeues` times."""
NOT_REQUEUED = 75
"""Exit code of the script of a job that stopped for its time limit and that the cluster does not requeue."""

SCRIPT = """\
#!/bin/bash
# One flow run of Prefect, written by r1flow. SIGUSR1 comes {stop_before_end_s} s before the time limit: the flow stops
# with a checkpoint, waits for its next start, and Slurm queues the job again. SIGTERM stops it in the same way.
{setup}
{machines}stopped=
trap 'stopped=time; kill -TERM "$flow" 2>/dev/null' USR1
trap 'kill -TERM "$flow" 2>/dev/null' TERM
{command} &
flow=$!
while :; do
  wait "$flow"; code=$?
  kill -0 "$flow" 2>/dev/null || break  # else a signal interrupted `wait`
done
if [ "$stopped" = time ]; then
  if [ "${{SLURM_RESTART_COUNT:-0}}" -ge {max_requeues} ]; then exit {gave_up}; fi
  echo "r1flow: the time limit is near; the job is queued again" >&2
  {requeue} && sleep 60  # Slurm ends the script meanwhile
  exit {not_requeued}
fi
exit "$code"
"""

OTHER_MACHINES = """\
# This machine is the first. The others take part in the trainers that the flow starts here.
export PET_RDZV_ENDPOINT="$(hostname):$((20000 + SLURM_JOB_ID % 10000))" PET_NODE_RANK=0
srun --nodes={others} --ntasks={others} --relative=1 --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" \\
  --kill-on-bad-exit=0 bash -c 'export PET_NODE_RANK=$((SLURM_PROCID + 1)); exec "$@"' bash {node} &
"""

_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")


class SlurmJobConfiguration(BaseJobConfiguration):
    """Settings of one job. The work pool's template explains the fields."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    nodes: int = Field(default=1, ge=1)
    gpus: int = Field(default=0, ge=0)
    cpus: int | None = Field(default=None, ge=1)
    memory: str | None = None
    options: list[str] = Field(default_factory=list)
    setup: str = ""
    python: str | None = None
    log_folder: str | None = None
    stop_before_end_s: int = Field(default=120, ge=1, le=65535)
    requeue: bool = True
    max_requeues: int = Field(default=100, ge=0)

    @field_validator("partition", "account", "qos", "time", "memory", "python", "log_folder", mode="before")
    @classmethod
    def _empty_is_unset(cls, value: Any) -> Any:
        """A form sends an empty field as an empty text."""
        return None if value == "" else value

    def prepare_for_flow_run(self, flow_run: FlowRun, *arguments: Any, **keywords: Any) -> None:
        """Fills in the command and the environment for a flow run."""
        has_command = self.command is not None
        super().prepare_for_flow_run(flow_run, *arguments, **keywords)
        if not has_command:
            self.command = shlex.join([self._python(), "-m", "prefect", "flow-run", "execute"])
        # The run waits for its next job, instead of being Crashed.
        self.env = {"PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR": "reschedule", **self.env}

    def environment(self) -> dict[str, str]:
        """The environment of `sbatch`, which the job inherits: the worker's, then the pool's and the run's variables.

        Values go no other way, so that no secret is in the script, which Slurm keeps and shows, and nothing has to be
        quoted.
        """
        # A worker that is itself in an allocation has variables that describe that one.
        own = {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or name[:6] != "SLURM_"}
        return {**own, **{name: value for name, value in self.env.items() if value is not None}}

    def log(self) -> Path:
        """Path of the job's output, with %j for the job's id."""
        folder = expanded(self.log_folder) if self.log_folder else home() / "logs" / "slurm"
        return folder / "%j.log"

    def options_of_sbatch(self) -> list[str]:
        """Arguments of `sbatch`. No shell reads them, so values need no quotes.

        Raises:
            InputError: a value that cannot be right.
        """
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise InputError(f"time {self.time!r}: write minutes, HH:MM:SS or DAYS-HH:MM:SS, for example 1-00:00:00")
        log = self.log()
        if not log.is_absolute():
            raise InputError(f"log_folder {self.log_folder!r}: give an absolute path that all nodes see")
        values = {
            "job-name": re.sub(r"[^\w .:=+-]", "_", self.name or "") or "r1flow",
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "time": self.time,
            "nodes": self.nodes,
            "gres": f"gpu:{self.gpus}" if self.gpus else None,
            "cpus-per-task": self.cpus,
            "mem": self.memory,
            "output": str(log.parent).replace("%", "%%") + f"/{log.name}",
            "open-mode": "append",
            "chdir": str(home()),
            "signal": f"B:USR1@{self.stop_before_end_s}",
        }
        options = [f"--{name}={value}" for name, value in values.items() if value is not None]
        options.append("--requeue" if self.requeue else "--no-requeue")
        for option in self.options:
            if not re.match(r"--[a-z]", option):
                raise InputError(f"options {option!r}: write each one as --name=value or --name")
            if option.split("=")[0] in ("--comment", "--export", "--parsable", "--signal", "--wrap", "--array"):
                raise InputError(f"options {option!r}: the worker sets this itself; remove it")
        options += self.options
        if bad := [option for option in options if re.search(r"[\0\n\r]", option)]:
            raise InputError(f"{bad[0].split('=')[0]}: a value must be one line")
        return options

    def _python(self) -> str:
        return self.python or sys.executable

    def script(self) -> str:
        """The batch script. It contains no value from outside, except `setup` and the command, which are shell code."""
        node, machines, command = f"{shlex.quote(self._python())} -m flows.installation.node", "", self.command
        if self.nodes > 1:
            machines, command = OTHER_MACHINES.format(others=self.nodes - 1, node=node), f"{node} {command}"
        return SCRIPT.format(
            setup=self.setup.rstrip(),
            machines=machines,
            command=command,
            stop_before_end_s=self.stop_before_end_s,
            max_requeues=self.max_requeues,
            gave_up=GAVE_UP,
            not_requeued=NOT_REQUEUED,
            requeue='scontrol requeue "$SLURM_JOB_ID"' if self.requeue else "false",
        )
