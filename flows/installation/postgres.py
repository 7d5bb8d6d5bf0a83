"""A PostgreSQL cluster in the home folder that stores the records of Prefect and MLflow when many runs are active.

It listens on loopback and requires a password that only the owner of the home folder can read. PostgreSQL refuses to
run as root; in that case it runs as the user that its package created.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import secrets
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from flows.installation.services import Databases
from flows.installation.supervisor import Service
from flows.prefect_server import HOST
from grpo.errors import InputError

USER, DATABASES = "r1flow", ("prefect", "mlflow")
INSTALLED = Path("/usr/lib/postgresql")
"""Where Debian keeps PostgreSQL's programs: outside PATH, in one folder per version."""
SYSTEM_USER = "postgres"


@dataclass(frozen=True)
class Cluster:
    """A cluster on a port. `folder` holds its data, its password and its log."""

    folder: Path
    port: int

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def version(self) -> str | None:
        """The major version of PostgreSQL that made the cluster, because no other can read it. None before that."""
        file = self.data / "PG_VERSION"
        return file.read_text().strip() if (self.folder / "password").is_file() and file.is_file() else None

    def service(self) -> Service:
        """The server as a service. SIGINT stops it immediately and cleanly."""
        place = ["-D", str(self.data), "-p", str(self.port), "-h", HOST, "-k", ""]
        return Service("postgres", [*_as_user(keep_alive=True), _program("postgres", self.version), *place], signal=2)

    def databases(self) -> Databases:
        password = (self.folder / "password").read_text().strip()
        place = f"{USER}:{password}@{HOST}:{self.port}"
        prefect, mlflow = DATABASES
        return Databases(f"postgresql+asyncpg://{place}/{prefect}", f"postgresql+psycopg://{place}/{mlflow}")

    def make(self) -> None:
        """Creates the cluster on disk unless it exists. Starts over if an earlier creation was killed.

        Raises:
            InputError: initdb failed, or the cluster's password is gone.
        """
        if (self.folder / "password").is_file():
            return
        if (self.data / "PG_VERSION").exists() and not (self.folder / "password.partial").exists():
            raise InputError(
                f"{self.folder / 'password'} is missing, and without it nobody can read the cluster beside it; restore "
                "the file from a backup, or move the folder away to start with an empty cluster"
            )
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.folder.chmod(0o700)
        if os.geteuid() == 0:
            shutil.chown(self.folder, SYSTEM_USER)
            home = self.folder.parent  # only accessible to us; the other user must be able to pass through
            home.chmod(stat.S_IMODE(home.stat().st_mode) | 0o001)
        password = self.folder / "password.partial"  # the other user must be able to read it
        password.touch(0o600)
        password.write_text(f"{secrets.token_hex(16)}\n")
        if os.geteuid() == 0:
            shutil.chown(password, SYSTEM_USER)
        command = [*_as_user(), _program("initdb"), "-D", str(self.data), "-U", USER, f"--pwfile={password}"]
        command += ["--auth=scram-sha-256", "--encoding=UTF8", "--no-locale"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd="/")
        if done.returncode != 0:
            message = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise InputError(
                f"initdb failed: {message}; the folder must be reachable for user {_user()}: {self.folder}"
            )
        password.replace(self.folder / "password")

    def make_databases(self) -> None:
        """Creates both databases in a running cluster."""
        import psycopg

        password = (self.folder / "password").read_text().strip()
        with psycopg.connect(
            host=HOST, port=self.port, user=USER, password=password, dbname="postgres", autocommit=True
        ) as connection:
            known = {name for (name,) in connection.execute("select datname from pg_database")}
            for name in DATABASES:
                if name not in known:
                    connection.execute(f"create database {name}")


def check(cluster: Cluster) -> None:
    """Raises InputError if something that the cluster needs is missing."""
    if cluster.version is None:
        _program("initdb")
    _program("postgres", cluster.version)
    if importlib.util.find_spec("psycopg") is None:
        raise InputError("--postgres needs the driver psycopg: pip install 'r1flow[postgres]'")
    if os.geteuid() == 0:
        try:
            pwd.getpwnam(SYSTEM_USER)
        except KeyError:
            raise InputError(
                f"Postgres does not run as root, and there is no user {SYSTEM_USER!r}; use another user"
            ) from None
        if shutil.which("setpriv") is None:
            raise InputError("Postgres does not run as root; run r1 as another user, or install setpriv (util-linux)")


def _program(name: str, version: str | None = None) -> str:
    """Path of a PostgreSQL program: of this major version, or of any."""
    on_path = shutil.which(name)
    if version is not None:
        if (program := INSTALLED / version / "bin" / name).is_file():
            return str(program)
        if on_path and _major(on_path) == version:
            return on_path
        raise InputError(
            f"--postgres needs PostgreSQL {version}, which made this home's records: apt install postgresql-{version}, "
            "or leave the flag out"
        )
    installed = sorted(INSTALLED.glob(f"*/bin/{name}"), key=lambda path: int(path.parents[1].name))
    if on_path or installed:
        return on_path or str(installed[-1])
    raise InputError(f"--postgres needs {name}, which is not installed: apt install postgresql, or leave the flag out")


def _major(program: str) -> str:
    """The major version in `postgres (PostgreSQL) 15.6 (Debian 15.6-0+deb12u1)`."""
    said = subprocess.run([program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout
    return found[1] if (found := re.search(r"\(PostgreSQL\) (\d+)", said)) else ""


def _user() -> str:
    return SYSTEM_USER if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name


def _as_user(keep_alive: bool = False) -> list[str]:
    """Prefix for a command that must not run as root. A change of user resets the parent-death signal."""
    if os.geteuid() != 0:
        return []
    ending = ["--pdeathsig", "INT"] if keep_alive else []
    return ["setpriv", "--reuid", SYSTEM_USER, "--regid", SYSTEM_USER, "--init-groups", *ending, "--"]
