"""Pages of docs/tutorials: their commands run as they stand there, and what the pages say is so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_COMMANDS = 10
INSTALLS = "make install"


def blocks(page: str) -> list[str]:
    """The bash blocks of a page."""
    text = (ROOT / "docs" / "tutorials" / f"{page}.md").read_text()
    return re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands(block: str) -> int:
    """Commands of a block: `&&` joins two; a here-document and an array are one with theirs."""
    bare = re.sub(r"<<'(\w+)'\n.*?^\1$", "", block, flags=re.DOTALL | re.MULTILINE)
    bare = re.sub(r"^own=\(.*?^\)$", "", bare, flags=re.DOTALL | re.MULTILINE)
    return sum(1 + line.count("&&") for line in bare.splitlines() if line.strip())


def bash(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "PYTHON"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept["PATH"]])
    environment = {**kept, "PATH": path, "R1FLOW_HOME": str(folder / "home")}
    command = ["bash", "-euo", "pipefail", "-c", script]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_your_reward(tmp_path: Path) -> None:
    """The stranger's path: an own problem file and an own reward, up to a trained checkpoint."""
    install, *rest = blocks("your-reward")
    assert install.startswith(INSTALLS)
    assert sum(map(commands, rest)) <= MOST_COMMANDS
    done = bash("\n".join(rest), tmp_path)
    assert done.returncode == 0, done.stderr
    work = tmp_path / "my-task"
    assert (work / "my-model" / "model.safetensors").is_file()
    shown = bash("cd my-task && r1 show latest:r1_zero --json", tmp_path)
    manifest = json.loads(shown.stdout)
    assert 0 < manifest["metrics"]["reward_my_rewards:brief"] <= 1

    rewards = work / "my_rewards.py"
    rewards.write_text(rewards.read_text().replace("response.tokens <", "response.tokens <="))
    (setting,) = re.findall(r"^own=\(.*?^\)$", "\n".join(rest), re.DOTALL | re.MULTILINE)
    plan = bash(f'cd my-task\n{setting}\nr1 plan my-recipe.toml --flow r1_zero "${{own[@]}}"', tmp_path).stdout
    states = dict(line.split()[:2] for line in plan.splitlines()[1:])
    assert (states["problems"], states["base"], states["r1_zero"]) == ("reuse", "reuse", "run")


@pytest.mark.system
def test_your_data(tmp_path: Path) -> None:
    """An own problem file becomes problems, own SFT rows enter the plan, and each file has the stage that reads it."""
    done = bash("\n".join(blocks("your-data")), tmp_path)
    assert done.returncode == 0, done.stderr
    manifest = json.loads(bash("cd my-data && r1 show latest:problems --json", tmp_path).stdout)
    counts = manifest["counts"]
    assert (counts["source0_read"], counts["source0_kept"], counts["source0_unverifiable"]) == (9**3, 9**3, 0)
    states = dict(line.split()[:2] for line in done.stdout.splitlines() if line.startswith("  "))
    assert (states["problems"], states["base"], states["sft_data"]) == ("reuse", "run", "run")
