"""Damage to files: artifacts that are read or reused, checkpoints, metrics, journals, databases."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.chaos.faults.registry import fault
from tests.chaos.reads import Watched
from tests.chaos.trial import Ended, Trial

DATA, SFT, RL = "cold_start_data", "cold_start_sft", "reasoning_rl"
Damage = Callable[[Trial, Path], None]


def flip(trial: Trial, path: Path) -> None:
    """One bit."""
    content = bytearray(path.read_bytes())
    place = trial.chance.randrange(len(content))
    content[place] ^= 1 << trial.chance.randrange(8)
    path.write_bytes(content)
    trial.notes.append(f"bit in byte {place} of {path.name}")


def truncate(trial: Trial, path: Path) -> None:
    """The end is missing; sometimes everything."""
    size = path.stat().st_size
    kept = trial.chance.choice([0, 1, size // 2, max(0, size - 1), trial.chance.randrange(size)])
    with path.open("r+b") as file:
        file.truncate(kept)
    trial.notes.append(f"{path.name} cut from {size} to {kept} bytes")


def blank(trial: Trial, path: Path) -> None:
    """A block of zeros, as a power cut leaves it on some file systems."""
    content = bytearray(path.read_bytes())
    begin = trial.chance.randrange(len(content))
    end = min(len(content), begin + 4096)
    content[begin:end] = bytes(end - begin)
    path.write_bytes(content)
    trial.notes.append(f"zeros from byte {begin} of {path.name}")


def remove(trial: Trial, path: Path) -> None:
    """The file is gone."""
    path.unlink()
    trial.notes.append(f"without {path.name}")


DAMAGES: dict[str, Damage] = {"flipped bit": flip, "truncated": truncate, "zeros": blank, "missing": remove}


def harm(trial: Trial, damage: Damage, patterns: tuple[str, ...]) -> Ended:
    """Damage one file that matches, run; the file comes back before the rerun unless the run replaced its folder. It
    struck if the damaged file was read or, of an artifact, replaced; if one is missing: what was left of its folder."""
    found = [p for pattern in patterns for p in trial.home.glob(pattern) if p.is_file() and p.stat().st_size]
    path = trial.chance.choice(sorted(found))
    copy = trial.homes.folder / "undamaged"
    shutil.copy2(path, copy)
    damage(trial, path)
    left = [path] if path.exists() else [path.parent, *(p for p in path.parent.iterdir() if p.is_file())]
    watched, before = Watched(left), _inode(path)

    def restore() -> None:
        if path.parent.is_dir():
            shutil.copy2(copy, path)

    trial.undo.append(restore)
    ended = trial.whole()
    in_use = "artifacts" in path.relative_to(trial.home).parts  # the folder of an attempt goes in any case
    if watched.were_read() or (in_use and _inode(path) != before):
        trial.struck = True
    return ended


def _inode(path: Path) -> int | None:
    return path.stat().st_ino if path.exists() else None


def artifact(stage: str, *names: str) -> tuple[str, ...]:
    """Patterns of files of a stage's artifact."""
    return tuple(f"artifacts/{stage}/*/*/{name}" for name in names)


MODEL, REST = ("model.safetensors",), ("*.json", "*.jinja")
for name, how in {"flipped bit": flip, "truncated": truncate}.items():
    # What a stage reads.
    fault(f"{name} in a model that is read", RL)(partial(harm, damage=how, patterns=artifact(SFT, *MODEL)))
    fault(f"{name} in a data set that is read", SFT)(
        partial(harm, damage=how, patterns=artifact(DATA, "*.parquet", "examples/*", "*.jsonl"))
    )
    fault(f"{name} in a manifest that is read", SFT, RL)(
        partial(harm, damage=how, patterns=(*artifact("base", "manifest.json"), *artifact(SFT, "manifest.json")))
    )
    # What would be reused.
    fault(f"{name} in a model that is reused", SFT, template="done")(
        partial(harm, damage=how, patterns=artifact(SFT, *MODEL, *REST))
    )
    fault(f"{name} in a data set that is reused", DATA, template="done")(
        partial(harm, damage=how, patterns=artifact(DATA, "*.parquet", "examples/*", "*.json*"))
    )
    # What an interrupted stage left.
    fault(f"{name} in a checkpoint", SFT, RL, template="half")(
        partial(harm, damage=how, patterns=("work/*/state/trainer/step-*/**/*",))
    )
    fault(f"{name} in the metrics of an attempt", SFT, RL, template="half")(
        partial(harm, damage=how, patterns=("work/*/trainer/metrics.jsonl",))
    )
    fault(f"{name} in the job or record of an attempt", SFT, RL, template="half")(
        partial(harm, damage=how, patterns=("work/*/*.json", "work/*/trainer/*.json"))
    )
    fault(f"{name} in the current pointers", SFT, RL)(partial(harm, damage=how, patterns=("current/*/*",)))
fault("truncated MLflow database", DATA)(partial(harm, damage=truncate, patterns=("mlflow.db",)))
fault("truncated Prefect database", DATA, own_server=True)(partial(harm, damage=truncate, patterns=("prefect/*.db",)))
for name in ("zeros", "missing"):
    fault(f"{name} file of a checkpoint", SFT, RL, template="half")(
        partial(harm, damage=DAMAGES[name], patterns=("work/*/state/trainer/step-*/**/*",))
    )
    fault(f"{name} file of an artifact", SFT, template="done")(
        partial(harm, damage=DAMAGES[name], patterns=artifact(SFT, "*"))
    )


@fault("half a checkpoint", SFT, RL, template="half")
def half_a_checkpoint(trial: Trial) -> Ended:
    """A checkpoint beside the newest one, without a random half of its files."""
    newest = max(trial.home.glob("work/*/state/trainer/step-*"))
    later = newest.with_name(f"step-{int(newest.name[5:]) + 1:08d}")
    shutil.copytree(newest, later)
    files = sorted(path for path in later.rglob("*") if path.is_file())
    for path in trial.chance.sample(files, max(1, len(files) // 2)):
        remove(trial, path)
    watched = Watched([later, *(path for path in later.rglob("*") if path.is_file())])
    ended = trial.whole()
    trial.struck = watched.were_read()
    return ended
