"""What benchmarks put in the place of the project's functions, and how they read a trainer's memory."""

from __future__ import annotations

import argparse
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("benchmark_scripts")
STUB = (
    "import sys\ndef main(arguments):\n    print('metrics of', *arguments)\n    return int(arguments == ['bad.json'])\n"
)


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of grpo, for processes that are started from now on."""
    (folder / "grpo").mkdir()
    (folder / "grpo" / "__init__.py").touch()
    (folder / "grpo" / "train.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_overhead_times_the_launchers_trainers_and_the_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import overhead

    from flows.stage_contract import runner
    from tasks.trainer import launch

    run_watched, build = launch.run_watched, runner._build
    monkeypatch.setattr(launch, "run_watched", run_watched)  # to be put back
    monkeypatch.setattr(runner, "_build", build)
    directly, builds = overhead.watch(tmp_path)
    assert launch.run_watched is directly and directly.wait is run_watched
    assert runner._build is builds and builds.make is build
    taken = len(inspect.signature(run_watched).parameters)
    assert len(inspect.signature(directly).parameters) == taken
    assert "run_watched(" in inspect.getsource(launch.launch)


def test_the_profile_sees_loops_wherever_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    import profile_step

    from grpo.model.cpu import kernels

    places = {
        "decode_attention": ["grpo.model.cpu.kernels", "grpo.model.decode.step_rows"],
        "sample_tokens": ["grpo.model.cpu.kernels", "grpo.model.decoding", "grpo.generation.draw_tokens"],
        "sum_rows": ["grpo.model.cpu.kernels"],
    }
    used = [(importlib.import_module(name), loop) for loop, names in places.items() for name in names]
    before = {loop: getattr(kernels, loop) for loop in profile_step.LOOPS}
    for loop in profile_step.LOOPS:
        monkeypatch.setattr(kernels, loop, before[loop])  # to be put back
    for module, loop in used:
        monkeypatch.setattr(module, loop, before[loop])
    profile_step.name_loops()
    assert all(getattr(module, loop) is not before[loop] for module, loop in used)
    holders = [m for name, m in sys.modules.items() if name.startswith("grpo.") and name != "grpo.model.cpu.loops"]
    assert [(m.__name__, loop) for m in holders for loop in before if vars(m).get(loop) is before[loop]] == []


def test_a_trainers_memory_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has held 300 MB. The trainer, which here does nothing, has not."""
    import trainer_memory
    from measure import high_water_mb

    held = bytearray(300 << 20)
    held[::4096] = b"x" * len(held[::4096])
    assert high_water_mb() > 300
    stand_in(tmp_path, monkeypatch)
    assert 5 < trainer_memory.trainer_mb(tmp_path / "job.json") < 150
    del held


def test_a_trainer_that_fails_has_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import trainer_memory

    stand_in(tmp_path, monkeypatch)
    with pytest.raises(subprocess.CalledProcessError):
        trainer_memory.trainer_mb(Path("bad.json"))


@pytest.mark.parametrize(("variable", "times_fair"), [("1", "1.60"), ("2,1", "1.33"), (None, "1.00")])
def test_the_fair_share_is_of_the_threads_that_a_job_has(
    variable: str | None, times_fair: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On four cores, beside four busy processes, a job's steps take twice as long. One thread has 4 x 1/5 of a core by
    right, instead of one; two 4 x 2/6 of two; four 4 x 4/8 of four, which is half: so that is fair."""
    import contention

    monkeypatch.delenv("OMP_NUM_THREADS")
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    text = contention.page({"RL": {0: [1.0], 4: [2.0]}}, argparse.Namespace(busy=[0, 4], seconds=20.0, rounds=1), 4)
    assert f"| RL | 4 | 2.000 | 2.00 | {times_fair} |" in text
