"""On a terminal no line of a command is longer than it is wide; in a pipe nothing is cut."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.cli import compare, deploy, plan_estimate, verify, why
from flows.cli import main as cli
from flows.cli.terminal import print_text
from flows.installation.reconcile import ResourceDiff
from flows.installation.resources import Resource
from tasks.store.audit import Flaw
from tests.flows.cli.test_prune import publish

COLUMNS = 48
LONG = "word " * 30 + "end"


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> Callable[[], list[str]]:
    """All lines that were printed on a terminal of 48 columns. Some fill it, so that the test tries something."""
    monkeypatch.setattr("flows.cli.terminal.width", lambda stream: COLUMNS)
    monkeypatch.setenv("R1FLOW_HOME", str(tmp_path))
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)

    def read() -> list[str]:
        shown = [line for text in capsys.readouterr() for line in text.splitlines()]
        assert COLUMNS - 8 <= max(map(len, shown)) <= COLUMNS, shown
        return shown

    return read


def command(*arguments: str) -> int:
    given = cli.parser().parse_args(arguments)
    return cli.COMMANDS[given.command](given)


def test_a_message_goes_on_in_the_next_line_and_is_whole(lines: Callable[[], list[str]]) -> None:
    print_text(LONG, indent="    ")
    shown = lines()
    assert [line[:4] for line in shown] == ["word", "    ", "    ", "    "]
    assert " ".join(" ".join(shown).split()) == LONG
    print_text("/" * 100)
    assert list(map(len, lines())) == [48, 48, 4]


def test_compare(lines: Callable[[], list[str]]) -> None:
    run = {"id": "0123456789", "name": LONG, "recipe": "tiny", "status": "FINISHED"}
    difference = {"value": 0.1, "low": 0.05, "high": 0.2, "paired": True, "problems": 4}
    compare.show(
        {
            "runs": [run, run],
            "config": [{"field": "reasoning_rl.kl_coef", "values": [LONG, "b"]}],
            "stages": [
                {
                    "stage": "reward_models",
                    "shared": False,
                    "keys": ["a", "b"],
                    "seconds": [1.0, 2.0],
                    "why": [[], [LONG]],
                }
            ],
            "metrics": [
                {
                    "checkpoint": "r1",
                    "metric": "pass@1 of a long set",
                    "values": [0.2, 0.3],
                    "differences": [difference],
                }
            ],
            "evaluations": ["a", "b"],
            "confidence": 0.95,
            "plot": f"/home/{'folder/' * 12}a.png",
        }
    )
    lines()


def test_why(lines: Callable[[], list[str]]) -> None:
    why._show([{"said": LONG, "why": [{"said": LONG}]}], 1)
    first, second = lines()
    assert first == f"  {LONG}"[: COLUMNS - 1] + "…" and second == f"    {LONG}"[: COLUMNS - 1] + "…"


def test_plan_and_its_estimate(lines: Callable[[], list[str]]) -> None:
    assert command("plan", "tiny") == 0
    assert lines()[0].startswith("tiny: ")
    stage = {"devices": 1, "device_hours": 1.0, "seconds": 3.0, "peak_memory_gb": 2.0, "peak_phase": "sampling"}
    stage |= {"host_gb": 1.0, "disk_gb": 1.0, "network_gb": 0.0, "source": "computed"}
    plan_estimate.show({"device": {"name": "H200"}, "stages": {"sft": stage}}, ["sft"])
    lines()


def test_verify_keeps_the_remedy(lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    flaw = Flaw("corrupt", "artifacts/sft/0123456789abcdef/1", LONG, remedy="run it again")
    monkeypatch.setattr(verify, "findings", lambda *, quick: iter([flaw]))
    assert command("verify") == 1
    shown = lines()
    assert shown[0].startswith("corrupt   artifacts/sft") and "run it again" in " ".join(" ".join(shown).split())


def test_prune(lines: Callable[[], list[str]], tmp_path: Path) -> None:
    old, _ = publish(tmp_path, 0), publish(tmp_path, 1)
    assert command("prune") == 0
    first, *rest = lines()
    assert first == f"    0.0 MB  {old.created[:19]}  sft {old.key[:12]}, attempt 1"[: COLUMNS - 1] + "…"
    assert " ".join(rest).endswith("1 artifacts stay; `r1 prune --yes` removes it")


def test_deploy(lines: Callable[[], list[str]]) -> None:
    old, new = ({"description": LONG + number} for number in "12")
    diff = ResourceDiff(Resource("deployment", "sft", new), Resource("deployment", "sft", old))
    deploy._show(f"http://{'host.' * 12}org/api", [diff])
    lines()


def test_env_breaks_lines_and_loses_nothing(lines: Callable[[], list[str]]) -> None:
    variables = {"R1FLOW_TEST": LONG}
    arguments = cli.parser().parse_args(["env"])
    assert cli.COMMANDS["env"](SimpleNamespace(**{**vars(arguments), "variables": variables})) == 0
    assert LONG in " ".join(" ".join(lines()).split())


def test_no_command_cuts_lines_by_itself() -> None:
    folder = Path(cli.__file__).parent
    assert [
        p.name for p in folder.glob("*.py") if re.search(r"\bfit\(", p.read_text()) and p.name != "terminal.py"
    ] == []


def test_nothing_is_cut_in_a_pipe(capsys: Any) -> None:
    why._show([{"said": LONG}], 1)
    assert capsys.readouterr().out == f"  {LONG}\n"
