"""Trainers in another environment (R1FLOW_TRAINER_PYTHON)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.config.common import Hardware
from grpo.errors import InputError
from grpo.other_environments import ALONE
from tasks.trainer.interpreter import VARIABLE, has_module, library_path, trainer_python, versions
from tasks.trainer.process_group import command, trainer_environment
from tests.support.environments import bare_environment, other_environment

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    return bare_environment(tmp_path_factory.mktemp("bare") / "env")


def test_it_is_this_python_unless_another_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert trainer_python() == sys.executable and library_path() == str(ROOT)
    assert has_module("torch") and not has_module("no_such_module")
    assert versions(("torch", "no-such-package")).keys() == {"torch"}


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("/no/such/python", "cannot be run"),
        ("/bin/cat", "is no Python"),
        ("{bare}", "lacks torch, transformers"),
    ],
)
def test_one_that_cannot_run_trainers_is_refused(
    named: str, said: str, bare: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, named.format(bare=bare))
    with pytest.raises(InputError, match=said) as refused:
        trainer_python()
    assert str(refused.value).startswith(f"{VARIABLE}=") and "\n" not in str(refused.value)


def test_trainers_find_the_library_there_and_nothing_else(bare: str) -> None:
    look = (
        "import importlib.util as u, json, grpo.errors, grpo.processes.notices;"
        "print(json.dumps([grpo.errors.__file__, *(u.find_spec(n) is not None for n in ('flows', 'pydantic'))]))"
    )
    done = subprocess.run([bare, "-c", look], env={"PYTHONPATH": ALONE}, cwd="/", capture_output=True, text=True)
    assert json.loads(done.stdout) == [str(ROOT / "grpo" / "errors.py"), False, False], done.stderr


def test_trainers_start_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment with the packages of this one; tests/grpo/processes/test_other_environments.py runs a job."""
    python = other_environment(tmp_path / "env")
    monkeypatch.setenv(VARIABLE, python)
    assert command(tmp_path / "job.json", 1)[0] == python
    assert trainer_environment({}, "mark", Hardware())["PYTHONPATH"].split(os.pathsep)[0] == library_path() == ALONE
    assert versions(("torch", "no-such-package")).keys() == {"torch"} and not has_module("no_such_module")
