"""`r1 prune` with a real MLflow store in a sqlite file."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from tasks.sft_data.shards import ProblemShard
from tasks.store.manifest import Manifest, artifact_key
from tasks.store.store import Store
from tasks.tracking.client import Tracking
from tasks.tracking.connection import default_uri


def publish(home: Path, number: int, loadable: bool = False) -> Manifest:
    store, config = Store(home), {"seed": 0, "number": number}
    with store.attempt("sft", artifact_key("sft", 1, config, {})) as attempt:
        if loadable:
            (attempt.out / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
            (attempt.out / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
        (attempt.out / "weights").write_bytes(b"w" * 1000 * (number + 1))
        return attempt.publish(stage_version=1, config=config)


def test_it_lists_first_and_keeps_what_is_promoted(tmp_path: Path, r1: Any) -> None:
    mine = type(r1)(tmp_path)
    old, champion, named, newest = (publish(tmp_path, number) for number in range(4))
    record = Tracking(default_uri(tmp_path))
    record.models.log(run := record.stage_run(None, "tiny", "sft", {}, {}), champion, "sft", 1)
    record.models.set_alias("tiny", "champion", champion)
    record.finish(run, "FINISHED")
    dry = mine("prune", "--keep", named.key[:12])
    assert dry.returncode == 0 and f"0.0 MB  {old.created[:19]}  sft {old.key[:12]}, attempt 1" in dry.stdout
    assert dry.stdout.count("\n") == 1
    assert "would free 0.0 MB, 1000 bytes; 3 artifacts stay; `r1 prune --yes` removes it" in dry.stderr
    assert len(Store(tmp_path).list()) == 4
    done = mine("prune", "--yes", "--json")
    said = json.loads(done.stdout)
    assert [entry["bytes"] for entry in said["removed"]] == [1000, 3000] and said["bytes"] == 4000
    assert said["kept"] == {"newest of its stage": 1, "promoted": 1}
    assert Store(tmp_path).list() == [champion, newest]
    assert mine("verify").returncode == 0
    unknown = mine("prune", "--keep", "latest:rl")
    assert unknown.returncode == 2 and unknown.stderr.startswith("error: latest:rl: no artifact of stage 'rl'")


def test_the_model_in_mlflow_loses_its_links_with_the_artifact(tmp_path: Path, r1: Any) -> None:
    old = publish(tmp_path, 0, loadable=True)
    publish(tmp_path, 1)  # the newest of its stage
    record = Tracking(default_uri(tmp_path))
    record.models.log(run := record.stage_run(None, "tiny", "sft", {}, {}), old, "sft", 1)
    record.finish(run, "FINISHED")
    (link,) = tmp_path.glob("mlartifacts/tiny/models/*/artifacts/model/weights")
    assert link.samefile(old.path / "weights")
    assert type(r1)(tmp_path)("prune", "--yes").returncode == 0
    assert not link.exists() and Store(tmp_path).find(old.key) is None


def test_old_runs_go_with_their_stages_and_reports_if_nothing_of_them_stays(tmp_path: Path, r1: Any) -> None:
    mine = type(r1)(tmp_path)
    record = Tracking(default_uri(tmp_path))
    days = {"old": 9, "old, its artifact stays": 9, "young": 1, "RUNNING": None}
    ids = {}
    for number, (name, age) in enumerate(days.items()):
        made = publish(tmp_path, number) if name != "RUNNING" else None
        ids[name] = record.recipe_run("tiny", name, {}, {"r1flow.flow": "train_r1"})
        stage = record.stage_run(
            ids[name], "tiny", f"sft of {name}", {}, {"r1flow.digest": made.digest if made else ""}
        )
        (tmp_path / "reports").mkdir(exist_ok=True)
        (tmp_path / "reports" / f"{ids[name][:12]}.html").touch()
        for run in (stage, ids[name]) if age else ():
            record.client.set_terminated(run, "FINISHED", end_time=int((time.time() - age * 86400) * 1000))
    kept = next(m.key for m in Store(tmp_path).list() if m.config["number"] == 1)
    asked = ["prune", "--keep", kept[:12], "--runs-older-than", "7"]

    def left() -> set[str]:
        experiment = record.client.get_experiment_by_name("tiny").experiment_id
        return {run.info.run_name for run in record.client.search_runs([experiment])}

    dry = mine(*asked)
    assert dry.returncode == 0 and f"{ids['old'][:12]}, 1 stages: old" in dry.stdout
    assert "would delete 1 runs in MLflow" in dry.stderr and len(left()) == 8
    done = mine(*asked, "--yes", "--json")
    assert [run["id"] for run in json.loads(done.stdout)["runs"]] == [ids["old"]]
    assert left() == {n for name in [*days][1:] for n in (name, f"sft of {name}")}
    assert {path.stem for path in (tmp_path / "reports").iterdir()} == {ids[name][:12] for name in [*days][1:]}
    record.client.restore_run(ids["old"])  # nothing is lost until `mlflow gc`
    assert "samples" not in done.stdout  # there are none
    refused = mine("prune", "--runs-older-than", "0")
    assert refused.returncode == 2 and refused.stderr == "error: --runs-older-than 0: give days, more than 0\n"


def test_samples_go_when_no_run_has_used_them_for_so_long(tmp_path: Path, r1: Any) -> None:
    days = time.time() - 9 * 86400
    shards = {name: ProblemShard(name, "sums", 1, tmp_path) for name in ("old", "used", "new")}
    for shard in shards.values():
        path = shard.samples(tmp_path / "samples")
        path.parent.mkdir(parents=True)
        path.write_bytes(b"s" * 1000)
        if shard.key != "new":
            for each in (path, path.parent):
                os.utime(each, (days, days))
    assert shards["used"].is_sampled(tmp_path / "samples")
    prune = ("prune", "--runs-older-than", "7", "--yes", "--json")
    attempt = tmp_path / "work" / "sft_data-0123456789abcdef"  # it may sample for weeks, or be continued
    attempt.mkdir(parents=True)
    (attempt / "attempt.json").write_text(json.dumps({"key": "0" * 64, "forced": False}))
    assert json.loads(type(r1)(tmp_path)(*prune).stdout)["removed"] == []
    listed = [part for part in prune if part != "--yes"]
    both = [f"unfinished {attempt.name}", "samples, 1 shards unused for so long"]
    for more in (listed, prune):  # as listed, so removed
        removed = json.loads(type(r1)(tmp_path)(*more, "--unfinished").stdout)["removable"]
        assert [each["what"] for each in removed] == both
    assert {path.name for path in (tmp_path / "samples").iterdir()} == {"used", "new"}
