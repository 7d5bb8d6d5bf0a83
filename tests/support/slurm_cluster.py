"""A Slurm cluster of two nodes on this machine: real munged, slurmctld and slurmd from Debian's packages, started by
hand in a folder of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows.prefect_server import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
START_S = 120.0

CONF = """
ClusterName=r1flowtest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,batch_sched_delay=0,bf_interval=2
KillWait=30
MinJobAge=300
ReturnToService=2
SlurmdTimeout=30
SlurmdParameters=config_overrides
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={n0} CPUs=4 RealMemory=8000 State=UNKNOWN
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1} CPUs=4 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP
PartitionName=empty Nodes=n0,n1 MaxTime=INFINITE State=DOWN
"""


def missing() -> str | None:
    """Why no cluster can be started here, or None."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        return f"no {', '.join(absent)} here: apt-get install slurmctld slurmd slurm-client munge"
    if os.geteuid() != 0:
        return "slurmd starts jobs as root only"
    return None


needs_slurm = pytest.mark.skipif(missing() is not None, reason=missing() or "")


class SlurmCluster:
    def __init__(self, folder: Path):
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}

    def start(self) -> None:
        for name in ("state", "n0", "n1", "log"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        ports = {name: free_port() for name in ("port", "n0", "n1")}
        conf = CONF.format(host=socket.gethostname().split(".")[0], user="root", folder=self.folder, **ports)
        (self.folder / "slurm.conf").write_text(conf)
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        options = [f"--{name}={self.folder / file}" for name, file in files.items()]
        self.run("munged", "--foreground", "--force", f"--log-file={self.folder}/log/munged.log", *options)
        self._wait_for(lambda: (self.folder / "munge.socket").exists())
        self.run("slurmctld", "-D", "-i")
        self.run("n0", "-D", "-N", "n0")
        self.run("n1", "-D", "-N", "n1")
        self._wait_for(
            lambda: self.ask("sinfo", "--noheader", "--states=idle", "--format=%D", "--partition=main") == "2"
        )

    def run(self, name: str, *options: str) -> None:
        """Start a daemon: a node by its name, others by their program's."""
        program = shutil.which("slurmd" if name in ("n0", "n1") else name, path=PATH)
        assert program is not None
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [program, *options],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].wait()

    def ask(self, *command: str) -> str:
        """Output of one of Slurm's commands; empty if it failed."""
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **self.environment})
        return done.stdout.strip()

    def stop(self) -> None:
        self.ask("scancel", "--user=root")
        for name in reversed(self._processes):
            self._processes[name].send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[name].wait(timeout=30)
            self._processes[name].kill()

    def _wait_for(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_S
        while not ready():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.3)

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()[-2000:]}" for path in (self.folder / "log").glob("*"))


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
