"""Which PostgreSQL a cluster is started with: the one that made it, because no other reads its data."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.installation import postgres
from flows.installation.postgres import Cluster, check
from grpo.errors import InputError


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Versions 14 and 17, in Debian's folders, and 16 on PATH."""
    monkeypatch.setattr(postgres, "INSTALLED", tmp_path / "versions")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("initdb", "postgres"):
        for version in ("14", "17"):
            path = tmp_path / "versions" / version / "bin" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\necho '{name} (PostgreSQL) 16.4 (Debian 16.4-1)'\n")
        path.chmod(0o755)
    return tmp_path


def program(cluster: Cluster) -> Path:
    (found,) = [Path(word) for word in cluster.service().command if word.endswith("/postgres")]
    return found


def made_by(version: str, folder: Path) -> Cluster:
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "PG_VERSION").write_text(f"{version}\n")
    (folder / "password").touch()
    return Cluster(folder, 5433)


def test_a_cluster_is_started_by_the_version_that_made_it(installed: Path) -> None:
    assert program(made_by("14", installed / "a")) == installed / "versions/14/bin/postgres"
    assert program(made_by("16", installed / "b")) == installed / "bin/postgres"


def test_a_version_that_is_gone_is_one_line(installed: Path) -> None:
    said = "--postgres needs PostgreSQL 15, which made this home's records: apt install postgresql-15, or leave the"
    with pytest.raises(InputError, match=said) as refused:
        check(made_by("15", installed / "a"))
    assert "\n" not in str(refused.value)


def test_a_new_cluster_takes_the_one_on_path_or_the_newest(installed: Path) -> None:
    cluster = Cluster(installed / "new", 5433)
    assert program(cluster) == installed / "bin/postgres"
    (installed / "bin" / "postgres").unlink()
    assert program(cluster) == installed / "versions/17/bin/postgres"


def test_a_cluster_without_its_password_is_not_made_anew(tmp_path: Path) -> None:
    """As in a home that was restored from a backup without secrets."""
    cluster = made_by("16", tmp_path / "postgres")
    (cluster.folder / "password").unlink()
    with pytest.raises(InputError, match="password is missing.*; restore the file"):
        cluster.make()
    assert (cluster.data / "PG_VERSION").read_text() == "16\n"
