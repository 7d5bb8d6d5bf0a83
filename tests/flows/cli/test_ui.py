"""`r1 ui` beside other servers of the same home."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flows.cli import ui
from flows.home import read_state
from flows.installation.services import write_state
from flows.prefect_server import free_port
from grpo.errors import InputError
from tasks.trainer.processes import process_name


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    return tmp_path


def test_it_leaves_an_installation_that_is_up_alone(home: Path) -> None:
    up = {"supervisor": process_name(os.getpid()), "ready": True}
    up |= {"prefect": "http://127.0.0.1:4200/api", "tracking": "http://127.0.0.1:5000"}
    write_state(home, up)
    with pytest.raises(InputError) as error:
        ui.serve(free_port(), free_port())
    assert str(error.value) == (
        f"the servers of {home} are up: Prefect at http://127.0.0.1:4200, MLflow at http://127.0.0.1:5000; "
        "`r1 down` stops them"
    )
    assert read_state(home) == up


def test_it_removes_no_state_but_its_own(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state(home, {"supervisor": f"{os.getpid()} of another start"})  # of an `r1 up` that was killed
    other = {"supervisor": "of an `r1 up` that began at the same moment"}
    seen = []

    def fails(*_: object) -> None:
        seen.append(read_state(home))
        if len(seen) == 2:
            write_state(home, other)
        raise InputError("no server")

    monkeypatch.setattr(ui, "prefect_server", fails)
    for left in ({}, other):
        with pytest.raises(InputError, match="no server"):
            ui.serve(free_port(), free_port())
        assert read_state(home) == left
    # `r1 up` and `r1 down` see it from its first moment, while the servers start.
    assert seen == [{"supervisor": process_name(os.getpid())}] * 2
