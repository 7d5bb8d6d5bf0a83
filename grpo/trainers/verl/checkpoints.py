"""verl's checkpoints: which step is the newest, and the model in it as a Hugging Face folder."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

from grpo.errors import InputError, TrainingStopped
from grpo.processes.metrics_log import replace_text

CONTENTS = ("model", "optimizer", "extra", "hf_model")
"""What a checkpoint has; hf_model is the Hugging Face folder."""
KEPT = 2
"""Checkpoints on disk. The older one goes after the newer is written."""
_TRACKER = "latest_checkpointed_iteration.txt"
"""verl's file with the step of the newest complete checkpoint."""


class Checkpoints:
    """The checkpoints in a folder, written by `processes` processes. `part`: the model's folder in a checkpoint."""

    def __init__(self, folder: Path, processes: int, part: str = ""):
        self.folder, self.processes, self.part = folder, processes, part

    def newest(self) -> int:
        """verl's step of the newest checkpoint, 0 without one. Raises InputError if another number of processes wrote
        it."""
        tracker = self.folder / _TRACKER
        if not tracker.is_file():
            return 0
        if not (text := tracker.read_text().strip()).isdecimal():  # verl could not read it either
            tracker.unlink()
            return 0
        step = int(text)
        names = [path.name for path in self._model(step).glob("model_world_size_*_rank_0.pt")]
        wrote = [int(re.findall(r"\d+", name)[0]) for name in names]
        if wrote and self.processes not in wrote:
            raise InputError(
                f"hardware.processes * hardware.nodes is {self.processes}, but {wrote[0]} processes wrote verl's "
                f"checkpoint of step {step}, and verl goes on with as many only; set them so, or begin again with "
                "--force"
            )
        return step

    def publish(self, step: int, out: Path, dtype: str) -> None:
        """Puts the model of a checkpoint into a folder, its weights as links where the file system has them."""
        written = next(self._model(step).glob("**/huggingface"), self._model(step))  # Megatron's is in `model`
        weights = [*written.glob("*.safetensors")]
        if not weights:
            raise TrainingStopped(f"verl wrote no model to {written}")
        for path in [*weights, *written.glob("*.safetensors.index.json"), *written.glob("generation_config.json")]:
            (out / path.name).unlink(missing_ok=True)
            try:
                os.link(path, out / path.name)
            except OSError:
                shutil.copyfile(path, out / path.name)
        config = json.loads((written / "config.json").read_text())
        config["dtype"] = dtype  # verl says bfloat16 whatever it wrote
        replace_text(out / "config.json", json.dumps(config, indent=2) + "\n")

    def _model(self, step: int) -> Path:
        return self.folder / f"global_step_{step}" / self.part
