"""Clocks that jump, and two commands at once."""

from __future__ import annotations

import struct
import subprocess
import time
from functools import partial
from pathlib import Path

from tasks.store.manifest import file_sha256
from tests.chaos.faults.registry import fault
from tests.chaos.trial import Command, Ended, Trial

DATA, SFT, RL = "cold_start_data", "cold_start_sft", "reasoning_rl"
DAY = 86_400


def jump(trial: Trial, seconds: int) -> Ended:
    """The wall clock jumps in the middle of a run, and back at its end."""
    source, clock = Path(__file__).with_suffix(".c"), trial.homes.folder / "clock"
    library = trial.homes.folder / f"clock-{file_sha256(source)[:8]}.so"
    if not library.exists():
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    clock.write_bytes(struct.pack("qq", 0, 0))
    trial.extra = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(clock)}
    with trial.running() as command:
        trial.moment(command, 12.0)
        with clock.open("r+b") as file:
            file.write(struct.pack("q", seconds))
    trial.struck = struct.unpack("qq", clock.read_bytes())[1] == 1
    return command.wait()


for name, seconds in {"a day ahead": DAY, "a day back": -DAY}.items():
    fault(f"clock jumps {name}", DATA, SFT, needs=("cc",))(partial(jump, seconds=seconds))
fault("clock jumps an hour back in resumed training", SFT, template="half", needs=("cc",))(partial(jump, seconds=-3600))


def both(trial: Trial, first: Command, second: Command) -> Ended:
    """Await both: the worse end counts."""
    ends = [first.wait(), second.wait()]
    number = len([*trial.home.glob(f"artifacts/{trial.target}/*/*/manifest.json")])
    if number != 1 and all(end.code == 0 for end in ends):
        trial.wrongs.append(f"{number} artifacts instead of one")
    return max(ends, key=lambda end: (end.hung, end.code != 0, end.code))


@fault("the same command twice at once", DATA, SFT)
def twice(trial: Trial) -> Ended:
    with trial.running() as command:
        time.sleep(trial.chance.uniform(0, 3))
        other = trial.start()
        trial.struck = command.process.poll() is None
        trial.undo.append(other.kill)
    return both(trial, command, other)


@fault("the same command twice, one of them killed", DATA, SFT)
def twice_one_killed(trial: Trial) -> Ended:
    """The one that is left has to make the artifact."""
    command = trial.start()
    trial.undo.append(command.kill)
    time.sleep(trial.chance.uniform(0, 3))
    with trial.running() as other:
        trial.moment(command, 12.0)
        trial.struck = trial.killed_other = command.process.poll() is None
        command.kill()
    return other.wait()


@fault("two recipes race for a key", DATA, SFT)
def two_recipes(trial: Trial) -> Ended:
    """Another recipe with the same settings."""
    source = Path("flows/recipes/tiny.toml")
    recipe = trial.homes.folder / "other.toml"
    recipe.write_text((Path(__file__).parents[3] / source).read_text().replace('name = "tiny"', 'name = "other"'))
    with trial.running() as command:
        time.sleep(trial.chance.uniform(0, 3))
        line = [str(recipe) if part == "tiny" else part for part in trial.homes.command(trial.target)]
        other = Command(line, trial.homes.environment())
        trial.struck = command.process.poll() is None
        trial.undo.append(other.kill)
    return both(trial, command, other)
