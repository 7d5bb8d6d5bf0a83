"""verl's checkpoints: which step is the newest, and the model in it as a Hugging Face folder."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

from grpo.config.common import Hardware
from grpo.errors import InputError, TrainingStopped
from grpo.processes.metrics_log import replace_text

CONTENTS = ("model", "optimizer", "extra", "hf_model")
"""What a checkpoint has; hf_model is the Hugging Face folder."""
KEPT = 2
"""Checkpoints that a run of verl keeps of its own. The older one goes after the newer is written."""
_TRACKER = "latest_checkpointed_iteration.txt"
"""verl's file with the step of the newest complete checkpoint."""
_DIVISION = "division.json"
"""Ours: how the model is divided in these checkpoints."""


class Checkpoints:
    """The checkpoints in a folder. `part`: the model's folder in a checkpoint."""

    def __init__(self, folder: Path, hardware: Hardware, part: str = ""):
        self.folder, self.part = folder, part
        self._division = _division(hardware)

    def newest(self) -> int:
        """verl's step of the newest complete checkpoint, 0 without one. Raises InputError if a model that is divided
        otherwise is in it."""
        tracker = self.folder / _TRACKER
        if not tracker.is_file():
            return 0
        text = tracker.read_text().strip()
        named = int(text) if text.isdecimal() else None
        # verl writes this file after a checkpoint is complete, but not atomically: where a kill left it empty, the last
        # checkpoint is complete. Where the one that it names is gone, an earlier one is: verl removes none before.
        step = max((step for step in self._steps() if named is None or step <= named), default=0)
        if step == 0:
            tracker.unlink()
        elif step != named:
            replace_text(tracker, str(step))
        if step:
            self._check_division(step)
        return step

    def begin(self) -> None:
        """Before a run of verl: removes all checkpoints but the newest, since verl removes only those of its own run,
        and records how the model is divided."""
        newest = self.newest()
        for step in self._steps():
            if step != newest:
                shutil.rmtree(self._folder(step))
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_text(self.folder / _DIVISION, json.dumps(self._division))

    def publish(self, step: int, out: Path, dtype: str, model: Path) -> None:
        """Puts the model of a checkpoint into a folder, its weights as links where the file system has them. `model`:
        the folder that training began with, whose code the model may need."""
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
        if "auto_map" in config:
            for path in model.glob("*.py"):
                shutil.copyfile(path, out / path.name)
        config["dtype"] = dtype  # verl says bfloat16 whatever it wrote
        replace_text(out / "config.json", json.dumps(config, indent=2) + "\n")

    def _steps(self) -> list[int]:
        names = [path.name for path in self.folder.glob("global_step_*")]
        return [int(found[1]) for name in names if (found := re.fullmatch(r"global_step_(\d+)", name))]

    def _check_division(self, step: int) -> None:
        file = self.folder / _DIVISION
        wrote = json.loads(file.read_text()) if file.is_file() else self._division
        for name, now in self._division.items():
            if wrote.get(name, now) != now:
                raise InputError(
                    f"{name} is {now}, but verl's checkpoint of step {step} was written with {wrote[name]}, and verl "
                    "goes on with the same only; set it so, or begin again with --force"
                )

    def _folder(self, step: int) -> Path:
        return self.folder / f"global_step_{step}"

    def _model(self, step: int) -> Path:
        return self._folder(step) / self.part


def _division(hardware: Hardware) -> dict[str, int | None]:
    """What must stay the same from one run to the next, under the names of settings: FSDP2's checkpoint has a file for
    each process; Megatron's can have another number of copies, but no other division of one."""
    assert hardware.trainer is not None
    if split := hardware.trainer.megatron:
        sizes = split.model_dump(include={"tensor", "pipeline", "context", "expert", "expert_tensor"})
        return {f"hardware.trainer.megatron.{name}": size for name, size in sizes.items()}
    return {"hardware.processes * hardware.nodes": hardware.processes * hardware.nodes}
