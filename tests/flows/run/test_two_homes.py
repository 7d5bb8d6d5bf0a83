"""Stages of one recipe in homes on separate folders, which share a bucket, a Prefect server, and no disk."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.prefect_server import Server
from tests.support.r1 import R1
from tests.support.s3_server import SECRET, S3Server, s3_server

pytestmark = [pytest.mark.system, pytest.mark.slow]
SMALL = [
    *(f"problems.sources.{number}.count=60" for number in range(2)),
    "problems.held_out_max=8",
    "base.documents=300",
    "base.pretrain.steps=3",
    "base.pretrain.hidden=24",
    "base.pretrain.feed_forward=48",
    "cold_start_data.problems=40",
    "cold_start_data.general=20",
    "cold_start_sft.max_steps=2",
]
SETS = [part for value in SMALL for part in ("--set", value)]


@dataclass
class Machine(R1):
    """The command r1 with a home of its own and the address of the bucket."""

    server: S3Server
    prefect: str = ""

    def environment(self) -> dict[str, str]:
        shared = {**self.server.environment("team"), **({"PREFECT_API_URL": self.prefect} if self.prefect else {})}
        return {**super().environment(), **shared}

    def stage(self, name: str, *more: str) -> dict[str, Any]:
        done = self("run", "tiny", *SETS, "--only", name, *more, "--json")
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])["stages"][-1]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as started:
        yield started


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = Server(tmp_path_factory.mktemp("prefect"))
    server.start()
    yield server.url
    server.stop()


def plain(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_stages_on_two_machines_share_a_bucket_and_no_disk(server: S3Server, prefect: str, tmp_path: Path) -> None:
    first, second = (Machine(tmp_path / name, server, prefect) for name in ("first", "second"))
    made = {name: first.stage(name) for name in ("problems", "base")}
    made["cold_start_data"] = second.stage("cold_start_data")  # reads both from the bucket
    made["cold_start_sft"] = first.stage("cold_start_sft")  # and this what the second machine made
    assert {name: stage["status"] for name, stage in made.items()} == dict.fromkeys(made, "ran")
    assert not list(tmp_path.glob("*/artifacts")) and not list(tmp_path.glob("*/work/*"))

    # A third machine, with an empty home, sees all of it, and fetches nothing to see it.
    third = Machine(tmp_path / "third", server)
    planned = json.loads(plain(third("plan", "tiny", *SETS, "--only", "cold_start_sft", "--json")))
    key = made["cold_start_sft"]["key"]
    assert [(one["status"], one["key"]) for one in planned["stages"] if one["name"] == "cold_start_sft"] == [
        ("reuse", key)
    ]
    listed = json.loads(plain(third("stages", "--json")))["artifacts"]
    assert {one["stage"]: one["key"] for one in listed} == {name: one["key"] for name, one in made.items()}
    digests = {one["stage"]: one["digest"] for one in listed}
    assert all(one["path"].startswith("s3://artifacts/team/files/") for one in listed)
    assert f"in s3://artifacts/team/files/{key}/" in plain(third("show", key[:12]))
    assert json.loads(plain(third("verify", "--json")))["findings"] == []
    assert json.loads(plain(third("prune", "--json")))["removable"] == []
    assert not list((tmp_path / "third").glob("object_store/*/files/*"))
    plain(third("export", "latest:cold_start_sft", str(tmp_path / "exported")))
    assert (tmp_path / "exported" / "model.safetensors").is_file()

    # Nothing of the credentials was written anywhere.
    for path in [*tmp_path.glob("*/logs/*"), *tmp_path.rglob("*.json"), *tmp_path.glob("*/*.db*")]:
        assert SECRET.encode() not in path.read_bytes(), path

    # A flipped bit in the bucket is refused where it arrives, in one line.
    client = server.client()
    under = f"team/files/{key}/{digests['cold_start_sft']}/model.safetensors"
    body = client.get_object(Bucket="artifacts", Key=under)["Body"].read()
    client.put_object(Bucket="artifacts", Key=under, Body=body[:-1] + bytes([body[-1] ^ 1]))
    fourth = Machine(tmp_path / "fourth", server)
    refused = fourth("export", "latest:cold_start_sft", str(tmp_path / "refused"))
    assert refused.returncode == 2 and not (tmp_path / "refused").exists()
    assert refused.stderr.count("\n") == 1 and "model.safetensors are not those that were published" in refused.stderr
    mended = json.loads(fourth("verify", "--repair", "--json").stdout)
    assert {one["kind"] for one in mended["findings"]} == {"corrupt", "missing", "orphaned"} and mended["left"] == 0
    planned = json.loads(plain(third("plan", "tiny", *SETS, "--only", "cold_start_sft", "--json")))
    assert [one["status"] for one in planned["stages"] if one["name"] == "cold_start_sft"] == ["run"]


def test_a_wrong_address_is_one_line(tmp_path: Path, server: S3Server) -> None:
    machine = Machine(tmp_path, server)
    for name, value, words in [
        ("R1FLOW_STORE", "s3://no-such-bucket/x", "no such bucket"),
        ("R1FLOW_STORE", "/a/folder", "give s3://BUCKET"),
        ("R1FLOW_CACHE_GB", "lots", "R1FLOW_CACHE_GB=lots"),
    ]:
        environment = {**machine.environment(), name: value}
        done = subprocess.run(machine.command("stages"), capture_output=True, text=True, env=environment, timeout=600)
        assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert words in done.stderr
