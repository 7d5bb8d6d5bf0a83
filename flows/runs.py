"""Runs, stages, metrics and data as pandas data frames, for notebooks and scripts.

from flows import runs

runs.table()                      # every recipe run, newest first
run = runs.load("latest")         # one of them
run.stages()                      # one row per stage: status, seconds, counts, the artifact's folder
run.checkpoints()                 # the closing table: one row per checkpoint, one column per metric
run.curves("reasoning_rl")        # one row per training step
run.data("problems", "train")     # what a stage wrote
run.samples("r1")                 # completions of an evaluation with their rewards
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from flows.home import store, tracking, use_servers
from grpo.errors import InputError
from tasks.evaluation.records import SAMPLES, TABLE
from tasks.store.manifest import Manifest
from tasks.tracking.reader import TrackedRun
from tasks.tracking.recipe_run import RecipeRun, StageRun, load_run
from tasks.tracking.tags import FAILED_TAG, FLOW_TAG, OVERRIDES_TAG, RECIPE_TAG, SEED_TAG

_NO_CURVES = ("system/", "final/")
"""Prefixes of metrics that are not curves over steps: system metrics, and results of earlier versions."""
_JSON_COLUMNS = ("metadata", "rewards")
"""Columns of parquet files that contain JSON text."""
_SHARD = re.compile(r"((part|shard|labels)-)?\d{5,}")
"""Names of shards, as mixes, sampling jobs, step labels and the filters of `sft_data` write them. A test set may be
called aime-2024."""


def table(recipe: str | None = None) -> pd.DataFrame:
    """One row per recipe run, newest first; the index is the run's id. `recipe`: only runs of this recipe."""
    use_servers()
    record = tracking()
    found = record.reader.recipe_runs() if not record.sqlite or record.sqlite.exists() else []
    rows = [_row(run) for run in found if recipe in (None, run.tags.get(RECIPE_TAG))]
    columns = ["run", "recipe", "flow", "seed", "status", "failed", "began", "seconds", "overrides", "name"]
    return pd.DataFrame(rows, columns=columns).set_index("run")


def _row(run: TrackedRun) -> dict[str, Any]:
    return {
        "run": run.id,
        "recipe": run.tags.get(RECIPE_TAG),
        "flow": run.tags.get(FLOW_TAG),
        "seed": int(run.tags.get(SEED_TAG, 0)),
        "status": run.status.lower(),
        "failed": run.tags.get(FAILED_TAG),
        "began": datetime.fromtimestamp(run.began, UTC),
        "seconds": run.ended - run.began if run.ended else None,
        "overrides": run.tags.get(OVERRIDES_TAG, ""),
        "name": run.name,
    }


def load(reference: str = "latest") -> Run:
    """A recipe run by its MLflow id (or id prefix), `latest` or `latest~N`.

    Raises:
        InputError: no run or several runs match the reference.
    """
    use_servers()
    reader = tracking().reader
    return Run(load_run(reader, store(), reader.find(reference)))


@dataclass(frozen=True)
class Run:
    """A recipe run. Every method returns a new frame, which you may change."""

    record: RecipeRun

    @property
    def id(self) -> str:
        return self.record.run.id

    @property
    def config(self) -> Mapping[str, Any]:
        """The whole recipe that was run, including every default."""
        return self.record.config

    def stages(self) -> pd.DataFrame:
        """One row per stage, in order; the index is the stage's name. Seconds are those of the work, even if the stage
        was reused."""
        rows = []
        for stage in self.record.stages:
            made = stage.manifest
            rows.append(
                {
                    "stage": stage.name,
                    "status": stage.status,
                    "seconds": stage.seconds,
                    "steps": made.steps_completed if made else None,
                    "key": made.key if made else None,
                    "stale": stage.stale or None,
                    "error": stage.error or None,
                    "folder": _folder(made) if made else None,
                }
            )
        columns = ["stage", "status", "seconds", "steps", "key", "stale", "error", "folder"]
        return pd.DataFrame(rows, columns=columns).set_index("stage")

    def counts(self) -> pd.DataFrame:
        """One row per count of a stage: how many rows were read, kept and dropped, and why."""
        rows = [
            {"stage": name, "count": count, "value": value}
            for name, manifest in self.record.manifests.items()
            for count, value in manifest.counts.items()
        ]
        return pd.DataFrame(rows, columns=["stage", "count", "value"]).set_index(["stage", "count"])

    def checkpoints(self) -> pd.DataFrame:
        """The closing table: one row per checkpoint, one column per metric. Shares are between 0 and 1. The bounds of
        an interval are the columns NAME_low and NAME_high."""
        text = self._artifact("evaluate").local(TABLE).read_text(encoding="utf-8")
        rows: list[dict[str, Any]] = []
        for checkpoint, metrics in json.loads(text).items():
            row: dict[str, Any] = {"checkpoint": checkpoint}
            for name, value in metrics.items():
                if isinstance(value, list):
                    of = name.removesuffix("_ci95")
                    row |= {f"{of}_low": value[0], f"{of}_high": value[1]}
                else:
                    row[name] = value
            rows.append(row)
        return pd.DataFrame(rows).set_index("checkpoint")

    def curves(self, stage: str) -> pd.DataFrame:
        """What a stage logged to MLflow: one row per step, one column per metric. A reused stage has the curves of the
        run that made it."""
        maker = self._stage(stage).maker
        reader = tracking().reader
        curves = {name: dict(reader.curve(maker.id, name)) for name in maker.metrics if not name.startswith(_NO_CURVES)}
        # A single value at step 0 is a result, such as peak memory.
        shown = {name: curve for name, curve in curves.items() if curve.keys() != {0}}
        return pd.DataFrame(shown).sort_index().rename_axis("step")

    def tables(self, stage: str) -> list[str]:
        """Names of the tables in a stage's artifact: parquet files without their extension, and folders of numbered
        shards."""
        return list(_tables(self._artifact(stage).local()))

    def data(self, stage: str, name: str | None = None) -> pd.DataFrame:
        """A table of a stage's artifact. `name` can be omitted if there is only one.

        Raises:
            InputError: the artifact has no such table; the message names the existing ones.
        """
        tables = _tables(self._artifact(stage).local())
        if name is None and len(tables) == 1:
            (name,) = tables
        if name not in tables:
            known = ", ".join(tables) or "none"
            raise InputError(f"{stage}: give the name of a table; there are: {known}")
        return _read(tables[name])

    def samples(self, checkpoint: str) -> pd.DataFrame:
        """Completions of a checkpoint in the evaluation: one row per sample, with its rewards as columns
        reward_NAME."""
        frame = self.data("evaluate", f"{SAMPLES}/{checkpoint}")
        rewards = pd.DataFrame(list(frame.pop("rewards")), index=frame.index).add_prefix("reward_")
        return frame.join(rewards)

    def _stage(self, name: str) -> StageRun:
        found = self.record.stage(name)
        if found is None:
            known = ", ".join(dict.fromkeys(stage.name for stage in self.record.stages)) or "none"
            raise InputError(f"run {self.record.run.label} has no stage {name!r}; it has: {known}")
        return found

    def _artifact(self, stage: str) -> Manifest:
        manifest = self._stage(stage).manifest
        if manifest is None:
            raise InputError(f"{stage}: run {self.record.run.label} made no artifact that is still in the store")
        return manifest


def _folder(made: Manifest) -> Path | str:
    """The folder of an artifact, or its address in an object store."""
    return made.path if made.remote is None else made.location


def _tables(folder: Path) -> dict[str, list[Path]]:
    """Name -> files of each table in an artifact."""
    tables: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*.parquet")):
        place = path.relative_to(folder)
        is_shard = _SHARD.fullmatch(place.stem) and place.parent != Path()
        tables.setdefault((place.parent if is_shard else place.with_suffix("")).as_posix(), []).append(path)
    return tables


def _read(paths: list[Path]) -> pd.DataFrame:
    frame = pd.concat([pd.read_parquet(path) for path in paths], ignore_index=True)
    for name in set(_JSON_COLUMNS) & set(frame.columns):
        frame[name] = [json.loads(text) if isinstance(text, str) else text for text in frame[name]]
    return frame
