"""The documentation against the repository: links resolve, named files exist, pictures show today's recipe."""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.support.r1 import pictured_digest

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
LONGEST_README = 1200
LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")
MODULE = re.compile(r"`((?:grpo|tasks|flows|tests|benchmarks|deployments|docs)/[\w/.-]+\.(?:py|toml|yaml|html))`")


def pages() -> list[Path]:
    """Every Markdown file that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in sorted(listed.stdout.split("\0")) if name and (ROOT / name).is_file()]


def prose(text: str) -> str:
    """The text without code, in which brackets mean something else."""
    fence = re.compile(r"^ *(`{3,}).*?^ *\1 *$", re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`(?!\])", "", fence.sub("", text))


@cache
def anchors(page: Path) -> frozenset[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    counts: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", prose_with_code(page.read_text()), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        number = counts.get(anchor, -1) + 1
        counts[anchor] = number
        if number:
            counts[f"{anchor}-{number}"] = 0
    return frozenset(counts)


def prose_with_code(text: str) -> str:
    """The text without fenced blocks, whose comments look like headings."""
    return re.sub(r"^ *(`{3,}).*?^ *\1 *$", "", text, flags=re.DOTALL | re.MULTILINE)


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links of a page that lead to no file or to no heading."""
    broken = []
    for link in LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_resolve(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_noticed() -> None:
    text = "[a](docs/nowhere.md) [b](docs/README.md#nowhere) [c](docs/README.md#measured) [d](https://example.org/x)"
    assert broken_links(ROOT / "README.md", text) == ["docs/nowhere.md", "docs/README.md#nowhere"]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_named_in_backticks_exist(page: Path) -> None:
    assert [name for name in MODULE.findall(page.read_text()) if not (ROOT / name).exists()] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= LONGEST_README


def test_the_index_names_every_page() -> None:
    """What it does not name is missing from the site's navigation, too."""
    index = ROOT / "docs" / "README.md"
    listed = re.findall(r"^- \[[^\]]+\]\(([^)#]+)\)", index.read_text(), re.MULTILINE)
    linked = {(index.parent / link).resolve() for link in listed}
    assert [page for page in pages() if page not in linked] == [ROOT / "README.md", index]


def test_pictures_show_the_recipe_of_today() -> None:
    """If this fails, the recipe was changed: take the pictures again with docs/take_screenshots.py."""
    taken = json.loads((IMAGES / "taken_at.json").read_text())
    assert pictured_digest(ROOT / taken["recipe"]) == taken["sha256"]


def test_the_readmes_numbers_are_those_of_todays_recipe() -> None:
    """If this fails, the recipe or the page was changed: run benchmarks/learning.py, and copy its rows."""
    page = (ROOT / "docs" / "measured" / "learning.md").read_text()
    assert pictured_digest(ROOT / "flows" / "recipes" / "tiny.toml")[:12] in page
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| .*\d.* \|$", readme.partition("## What the result means")[0], re.MULTILINE)
    assert len(rows) >= 8 and set(rows) <= set(page.splitlines())


def test_each_interface_is_shown_where_it_is_introduced() -> None:
    readme, comparing = ((ROOT / name).read_text() for name in ("README.md", "docs/comparing.md"))
    assert {"prefect", "mlflow", "report"} <= set(re.findall(r"\(docs/images/([a-z]+)[\w-]*\.png\)", readme))
    assert "(images/mlflow-reasoning-rl.png)" in comparing.partition("step by step")[2].partition("\n## ")[0]


def test_the_mark_of_changed_files_is_the_one_of_the_program() -> None:
    source = (ROOT / "tasks" / "estimate" / "origin.py").read_text()
    assert "-dirty" in source and "with `-dirty` if files have changed" in (ROOT / "docs" / "commands.md").read_text()


def test_every_picture_comes_from_the_script() -> None:
    taken = json.loads((IMAGES / "taken_at.json").read_text())
    assert sorted(path.name for path in IMAGES.glob("*.png")) == taken["pictures"]
    script = (ROOT / "docs" / "take_screenshots.py").read_text()
    assert [name for name in taken["pictures"] if f'"{Path(name).stem}"' not in script] == []
