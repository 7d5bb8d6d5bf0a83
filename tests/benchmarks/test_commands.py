"""Commands in the Makefile, in pages and in the scripts' own help start their script."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = [ROOT / "Makefile", *ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.py")]
COMMAND = re.compile(r"python\S* benchmarks/(\w+\.py)")


@pytest.mark.parametrize(
    "script", sorted({name for text in TEXTS for name in COMMAND.findall(text.read_text(encoding="utf-8"))})
)
def test_a_script_started_by_its_path_finds_what_it_imports(script: str) -> None:
    """The folder of the script is on Python's path then, and the repository is not."""
    unseen, _, _ = (ROOT / "benchmarks" / script).read_text(encoding="utf-8").partition("sys.path.insert(")
    assert not re.search(r"^(from|import) (benchmarks|tests)\b", unseen, re.MULTILINE)
