"""`r1 prune` with a real MLflow store in a sqlite file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tasks.store.manifest import Manifest, artifact_key
from tasks.store.store import Store
from tasks.tracking.client import Tracking
from tasks.tracking.connection import default_uri


def publish(home: Path, number: int) -> Manifest:
    store, config = Store(home), {"seed": 0, "number": number}
    with store.attempt("sft", artifact_key("sft", 1, config, {})) as attempt:
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
