"""What a stage declares, and the key of its artifact. runner.py runs stages according to it.

    key = sha256(stage, stage version, canonical config with the seed, digests of the inputs)

A stage is a `Stage` in its own module; its Prefect flow is in flows/stage_flows.py. Settings that change where a stage
runs, but not its output (devices, logging), are not part of the key.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from flows.home import home
from flows.recipe.schema import Recipe
from flows.stage_contract.references import Input, named_files, resolve
from flows.stage_contract.stage_progress import StageProgress
from grpo.errors import InputError
from tasks.store.attempt import Attempt
from tasks.store.manifest import ONCE_HASHED, InputRef, Manifest, artifact_key
from tasks.store.whole_file import write_whole
from tasks.tracking.client import Tracking
from tasks.tracking.results import CompletionsTable
from tasks.trainer.launch import COMPLETIONS, LOG, hardware_of, launch, read_metrics
from tasks.trainer.processes import PEAK_MEMORY_FILE
from tasks.trainer.rendezvous import Rendezvous

NOT_HASHED = {
    *("device", "fused", "attention", "sampler", "workers", "processes", "nodes", "budget_requests", "budget_tokens"),
    *("sequence_parallel", "tensor_parallel", "python", "megatron"),
    *("gpu_memory_utilization", "kv_cache_gb", "urls", "urls_file", "copy_after", "backoff_s", "away_max_s", "ray"),
    *("url", "api_key_env", "transfer", "timeout_s", "retries", "concurrency", "requests_per_minute"),
} | ONCE_HASHED
"""Names of settings that affect where and how fast a stage runs or what it logs, but not its output. (`save_every` does
where a health check rolls back, and so does the time that steps take, by which checkpoints are due too; that is
accepted. Settings that only bound memory change the order of sums.)"""

ALONE = "single-stages"
"""MLflow experiment for stages that run outside of a recipe."""


class RunContext(BaseModel):
    """Where a stage runs and is recorded. It does not change the output, so it is no part of the key."""

    model_config = ConfigDict(extra="forbid")

    recipe: str = Field(ALONE, description="MLflow experiment.")
    parent_run_id: str | None = Field(None, description="MLflow run of the recipe run that this stage belongs to.")
    force: bool = Field(False, description="Make it again although it exists.")
    label: str | None = Field(None, description="Recipe, seed and overrides of the recipe's run; names its flow runs.")
    key: str | None = Field(None, description="The key that the caller found; another one here is an error.")
    time_limit_hours: float | None = Field(
        None, gt=0, description="A trainer that runs longer is stopped. None: never."
    )

    def name_run(self, what: str, seed: int) -> str:
        """Name of a run in Prefect and MLflow: `sft tiny seed 0 · sft.epochs=2`."""
        return f"{what} {self.label or f'seed {seed}'}"


@dataclass
class Outcome:
    """A stage's report on the output in its `out` folder."""

    counts: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    steps_completed: int | None = None
    model: str | None = None  # name of the checkpoint, if `out` is one
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    evaluated: dict[str, str] = field(default_factory=dict)  # input -> name of the checkpoint that `metrics` describe


@dataclass(frozen=True)
class Stage:
    """A stage of the recipe. `needs`: stages whose artifacts it reads; `version`: raised when its code's output
    changes; `files`: local files and folders that the configuration points to; `extra`: hashed in addition to the
    config; `mixed`: allows models with different tokenizers or chat templates among the inputs; `shown`: Markdown about
    an artifact for Prefect's pages; if empty, its numbers are shown."""

    name: str
    version: int
    needs: tuple[str, ...]
    build: Callable[[Context], Outcome]
    files: Callable[[Any], dict[str, str | Path]] = lambda config: {}
    extra: Callable[[Any], dict[str, Any]] = lambda config: {}
    mixed: bool = False
    shown: Callable[[Manifest], str] = lambda manifest: ""


@dataclass(frozen=True)
class Step:
    """A stage in a pipeline: its contract, the Prefect flow that runs it, and the steps that make its inputs."""

    stage: Stage
    flow: str = ""  # name in flows/stage_flows.py, if it is not the stage's
    parameters: Mapping[str, Any] = field(default_factory=dict)  # of the flow, in addition to those of every stage
    takes: Mapping[str, str] = field(default_factory=dict)  # input -> name of its step, if different
    section: Callable[[Recipe], BaseModel] | None = None  # None: the recipe's section with the stage's name

    @property
    def name(self) -> str:
        return self.stage.name

    @property
    def flow_name(self) -> str:
        return self.flow or self.name

    def config(self, recipe: Recipe) -> BaseModel:
        """The part of the recipe that configures the stage."""
        return self.section(recipe) if self.section else section_of(recipe, self.name)

    @property
    def inputs(self) -> dict[str, str]:
        """Input of the stage -> name of the step that makes it."""
        return {name: self.takes.get(name, name) for name in self.stage.needs}


def section_of(recipe: Recipe, name: str) -> Any:
    """The recipe's section with this name.

    Raises:
        InputError: the recipe does not have it.
    """
    section = getattr(recipe, name)
    if section is None:
        raise InputError(f"recipe {recipe.name!r} has no section {name}; add it to run this flow")
    return section


@dataclass
class Context:
    """Everything that a stage's `build` needs."""

    stage: Stage
    config: Any
    seed: int
    inputs: dict[str, Input]
    attempt: Attempt
    where: RunContext
    tracking: Tracking
    run_id: str
    progress: StageProgress

    @property
    def out(self) -> Path:
        return self.attempt.out

    def path(self, name: str) -> Path:
        """Path of the input `name`."""
        return self.inputs[name].path

    def name_task(self, what: str) -> Callable[[], str]:
        """Name of a task's run: `sft: trainer, tiny seed 0`. A function, because Prefect fills in braces of strings."""
        return lambda: self.where.name_run(f"{self.stage.name}: {what},", self.seed)

    def run_job(
        self, kind: str, name: str = "trainer", out: Path | None = None, again: bool = False, **values: Any
    ) -> dict[str, Any]:
        """Runs a job of grpo/ in a subprocess and returns its result. Its metrics go to MLflow and the progress line.

        A second call with the same `name`, after a kill, continues from the job's last checkpoint. If the job had
        finished, and is not to run `again`, its result is returned at once; its metrics go to this attempt's own run.
        """
        from prefect import task
        from prefect.cache_policies import NO_CACHE

        from flows.stage_contract.gpu_slots import gpu_slots

        work = self.attempt.work / name
        work.mkdir(parents=True, exist_ok=True)
        metrics = work / "metrics.jsonl"
        prefix = "" if name == "trainer" else f"{name}/"
        if metrics.is_file():  # from the attempt that this one continues, whose curve also belongs to this run
            self._on_metrics(prefix, read_metrics(metrics))
        completions = CompletionsTable(self.tracking, self.run_id, f"{prefix}completions")
        completions.add(read_metrics(work / COMPLETIONS))
        done = work / "done.json"
        if done.is_file() and not again:
            finished: dict[str, Any] = json.loads(done.read_text())
            return finished
        job = {
            "kind": kind,
            "out": out or self.out,
            "state": self.attempt.state / name,
            "metrics": metrics,
            "result": work / "result.json",
            "seed": self.seed,
            **values,
        }
        limit = self.where.time_limit_hours
        run = task(name=f"run {kind}", task_run_name=self.name_task(name), cache_policy=NO_CACHE)(launch)
        plain = json.loads(json.dumps(job, default=_jsonable))
        try:
            with gpu_slots(hardware_of(plain)):
                result = run(
                    plain,
                    work,
                    on_metrics=lambda records: self._on_metrics(prefix, records),
                    on_completions=completions.add,
                    rendezvous=Rendezvous.of_environment(home()),
                    time_limit_s=limit * 3600 if limit else None,
                    lock_fd=self.attempt.lock_fd,
                )
        finally:  # also for a failed job, whose log is read first
            if (log := work / LOG).is_file():
                self.tracking.log_file(self.run_id, log, f"logs/{name}")
        if (used := work / PEAK_MEMORY_FILE).is_file():  # logged for comparison with the estimate
            gigabytes = json.loads(used.read_text())["peak_bytes"] / 1e9
            # Among the system metrics, so that "Model metrics" of a training run has only curves. MLflow shows a metric
            # that has only step 0 as a bar, not as a one-point curve.
            self.tracking.log_metrics(self.run_id, [{"step": 0, f"system/{prefix}peak_memory_gb": gigabytes}])
        write_whole(done, json.dumps(result))
        return result

    def _on_metrics(self, prefix: str, records: list[dict[str, Any]]) -> None:
        self.progress.show(prefix.rstrip("/"), records)
        named = [{(k if k == "step" else prefix + k): v for k, v in r.items() if k != "of"} for r in records]
        self.tracking.log_metrics(self.run_id, named)


def _jsonable(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} cannot stand in a job file")


def hashed_config(stage: Stage, config: BaseModel, seed: int) -> dict[str, Any]:
    """The part of a configuration that decides the stage's output."""
    files = stage.files(config)
    values = _without_places(config, config.model_dump(mode="json"), {str(path): name for name, path in files.items()})
    return {**values, **stage.extra(config), "seed": seed}


def hashed_values(settings: BaseModel, **dumped: Any) -> dict[str, Any]:
    """Plain values of settings, without those that do not change the result. `dumped`: arguments of `model_dump`."""
    hashed: dict[str, Any] = _without_places(settings, settings.model_dump(mode="json", **dumped), {})
    return hashed


def _without_places(settings: Any, values: Any, files: Mapping[str, str]) -> Any:
    """`values`, the dump of `settings`, without fields in NOT_HASHED. Keys that a user chose, such as names of sources
    and rewards, all stay. Replaces file paths by input names, because the files' contents enter the key as digests of
    inputs."""
    if isinstance(values, Mapping):
        chosen = isinstance(settings, Mapping)
        return {
            key: _without_places(settings.get(key) if chosen else getattr(settings, key, None), value, files)
            for key, value in values.items()
            if chosen or key not in NOT_HASHED
        }
    if isinstance(values, list):
        parts = settings if isinstance(settings, (list, tuple)) else [None] * len(values)
        return [_without_places(part, value, files) for part, value in zip(parts, values, strict=True)]
    return f"input:{files[values]}" if isinstance(values, str) and values in files else values


def key_of(stage: Stage, config: BaseModel, seed: int, inputs: Mapping[str, InputRef]) -> str:
    """The key of a stage's artifact: a hash of name, version, configuration, seed and digests of the inputs."""
    digests = {name: ref.digest for name, ref in inputs.items()}
    return artifact_key(stage.name, stage.version, hashed_config(stage, config, seed), digests)


def find_inputs(stage: Stage, config: BaseModel, inputs: Mapping[str, str]) -> dict[str, Input]:
    """The given inputs, the newest artifact of every other needed stage, and the configuration's files."""
    if unknown := set(inputs) - set(stage.needs):
        names = ", ".join(stage.needs) or "none"
        raise InputError(f"stage {stage.name!r} has no input {sorted(unknown)[0]!r}; its inputs: {names}")
    resolved = {name: resolve(inputs.get(name, "latest"), name) for name in stage.needs}
    tokenizers = {
        n: i.manifest.tokenizer_sha256 for n, i in resolved.items() if i.manifest and i.manifest.tokenizer_sha256
    }
    if len(set(tokenizers.values())) > 1 and not stage.mixed:
        first, *others = tokenizers
        other = next(name for name in others if tokenizers[name] != tokenizers[first])
        raise InputError(
            f"stage {stage.name!r}: inputs {first} and {other} have different tokenizers or chat templates; take both "
            "from one recipe"
        )
    return resolved | named_files(stage.files(config), config, f"{stage.name}.")


def find_key(stage: Stage, config: BaseModel, inputs: Mapping[str, str], seed: int) -> tuple[dict[str, Input], str]:
    """A stage's inputs, and the key that results from them."""
    resolved = find_inputs(stage, config, inputs)
    return resolved, key_of(stage, config, seed, {name: item.ref for name, item in resolved.items()})


def clear_folder(path: Path) -> Path:
    """Replaces `path` by an empty folder, whatever an earlier attempt left there."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path
