"""Decides which weights a validated job returns, and when it stops early.

The best weights are kept only on disk. They are deleted only after all checkpoints that refer to them, so that a job
that was killed or rolled back still finds them.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpo.distributed import checkpoint
from grpo.distributed.process_group import Parallel
from grpo.distributed.tensor_io import Modules
from grpo.errors import TrainingStopped

PREFIX = "validation/"
"""Prefix of the names of validation metrics."""
_BEST = "best-"


@dataclass
class Best:
    """The best validation so far. Every checkpoint contains its fields."""

    step: int = 0  # 0: none yet
    value: float = -math.inf
    metrics: dict[str, float] = field(default_factory=dict)
    since: int = 0  # number of validations after it

    def observe(self, step: int, value: float, metrics: dict[str, float]) -> bool:
        """Records a validation. Returns whether it is better than all before; ties and NaN are not."""
        if math.isfinite(value) and value > self.value:
            self.step, self.value, self.metrics, self.since = step, value, metrics, 0
            return True
        self.since += 1
        return False


class Selection:
    """Chooses among the validated steps of a job. All processes must call it together and make the same choice."""

    def __init__(self, parallel: Parallel, folder: Path, modules: Modules, keep: str, patience: int | None):
        """`folder`: the job's state; `modules`: the modules whose weights are kept; `keep`: "best" or "last"."""
        self.parallel, self.folder, self.modules = parallel, folder, modules
        self.keeps_best, self.patience = keep == "best", patience
        self.best = Best()
        self.latest: tuple[int, dict[str, float]] = 0, {}
        self._in_checkpoints = 0, 0  # steps of the best weights in the last two checkpoints

    @property
    def stops(self) -> bool:
        """Whether patience has run out."""
        return self.patience is not None and self.best.since >= self.patience

    def observe(self, step: int, value: float, metrics: dict[str, float]) -> None:
        """Records the validation after `step`; higher is better. Saves the weights if they are the best so far."""
        self.latest = step, metrics
        if self.best.observe(step, value, metrics) and self.keeps_best:
            checkpoint.save_weights(self.parallel, self._weights(step), self.modules)
            self._clean()

    def kept(self, metric: str) -> dict[str, Any]:
        """The weights that the job returns: their step, the metric's name, its value there, and all metrics there.

        Raises:
            TrainingStopped: the best weights are asked for, and no validation was finite, so there are none.
        """
        if self.keeps_best and not self.best.step:
            raise TrainingStopped(
                f"{PREFIX}{metric} was never finite, so no weights are the best; lower optimizer.learning_rate, or see "
                "in the curves when training diverged"
            )
        step, metrics = (self.best.step, self.best.metrics) if self.keeps_best else self.latest
        return {"step": step, "metric": metric, "value": metrics.get(PREFIX + metric), "metrics": metrics}

    def load(self, step: int) -> None:
        """Replaces the weights after `step` with the best weights, if `keep` says so."""
        if self.keeps_best and self.best.step not in (0, step):
            checkpoint.load_weights(self.parallel, self._weights(self.best.step), self.modules)

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {"best": asdict(self.best), "latest": list(self.latest), "best_before": self._in_checkpoints[1]}

    def needed(self, plain: Mapping[str, Any]) -> list[Path]:
        """Folders of best weights to which a checkpoint with this plain data refers."""
        state = plain.get("validation")
        step = Best(**state["best"]).step if state is not None and self.keeps_best else 0
        return [self._weights(step)] if step else []

    def saved(self) -> None:
        """Call after a checkpoint with the current state was saved. Deletes best weights to which only deleted
        checkpoints referred."""
        self._in_checkpoints = self._in_checkpoints[1], self.best.step
        self._clean()

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """The inverse of `state`. None, from a checkpoint without validations, starts from scratch."""
        self.best, self.latest, before = Best(), (0, {}), 0
        if state is not None:
            self.best, self.latest = Best(**state["best"]), tuple(state["latest"])
            before = state.get("best_before", 0)
        self._in_checkpoints = before, self.best.step

    def _weights(self, step: int) -> Path:
        return self.folder / f"{_BEST}{step:08d}"

    def _clean(self) -> None:
        kept = {self._weights(step) for step in (self.best.step, *self._in_checkpoints)}
        if self.parallel.is_main:
            for folder in set(self.folder.glob(f"{_BEST}*")) - kept:
                shutil.rmtree(folder)
        self.parallel.barrier()
