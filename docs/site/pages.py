"""Gathers what the site is made from in one folder: `python docs/site/pages.py FOLDER`.

Documents keep their places in the repository, so links between them stay as they are. Source files that a document
links to become pages under source/. The contents of docs/README.md become the navigation. A link that leads to nothing
is left alone: Sphinx then fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mmdr
from api import write_api

ROOT = Path(__file__).parents[2]
INDEX = "docs/README.md"
FENCE = re.compile(r"^( *)(`{3,})(\w*).*?\n(.*?)^ *\2 *$", re.DOTALL | re.MULTILINE)
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml"}
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")


def tracked(*patterns: str) -> list[str]:
    """Paths of the repository's files, relative to its root."""
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def page_of(path: str) -> str:
    """The page of a file or folder of the repository, relative to the site's folder."""
    if path == "README.md":
        return "index.md"
    if path.endswith((".md", ".png")):
        return path
    return path.replace(".ipynb", ".md") if path.endswith(".ipynb") else f"source/{path}.md"


class Site:
    """The folder of the site, and the source files that its documents link to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = set(tracked())
        self.folders = {str(parent) for file in self.files for parent in Path(file).parents}
        self.sources: set[str] = set()
        self.diagrams = 0

    def write(self, page: str, text: str) -> None:
        path = self.folder / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def document(self, path: str, text: str) -> None:
        """Adds a document, its text as it stands at `path` of the repository."""
        self.write(page_of(path), outside_code(text, lambda prose: self.links(path, prose), self.diagram))

    def links(self, path: str, prose: str) -> str:
        """The text with links to the pages of what they link to."""

        def to_page(link: re.Match[str]) -> str:
            target = os.path.normpath(os.path.join(os.path.dirname(path), link[2]))
            if target not in self.files and target not in self.folders:
                return link[0]
            page = page_of(target)
            if page.startswith("source/"):
                self.sources.add(target)
            return link[1] + "/" + page + (link[3] or "")

        return LINK.sub(to_page, prose)

    def diagram(self, code: str) -> str:
        """A picture of a Mermaid diagram, from top to bottom since pages are narrow."""
        self.diagrams += 1
        name = f"images/diagram-{self.diagrams}.svg"
        self.write(name, mmdr.Diagram(code.replace("flowchart LR", "flowchart TD")).svg())
        return f"![A diagram](/{name})"

    def source(self, path: str) -> None:
        """Adds the page of a source file, or of a folder with the list of its files."""
        if path in self.files:
            language = LANGUAGES.get(Path(path).suffix, "text")
            text = f"``````{language}\n{(ROOT / path).read_text()}\n``````"
        else:
            names = [os.path.basename(file) for file in sorted(self.files) if os.path.dirname(file) == path]
            text = self.links(f"{path}/", "\n".join(f"- [{name}]({name})" for name in names if name != "__init__.py"))
        self.write(page_of(path), f"---\norphan: true\n---\n# {path}\n\n{text}\n")


def outside_code(text: str, change: Callable[[str], str], draw: Callable[[str], str]) -> str:
    """The text with `change` applied outside fenced blocks and `draw` to blocks of Mermaid."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), draw(fence[4]) if fence[3] == "mermaid" else fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def notebook(text: str) -> str:
    """A notebook as a document: its texts and its code."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]
    return "\n\n".join(source if kind == "markdown" else f"```python\n{source}\n```" for kind, source in cells) + "\n"


def navigation(index: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Sections of docs/README.md with the titles and paths of the pages that their lists name."""
    sections = []
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        links = re.findall(r"^- \[([^\]]+)\]\(([^)]+)\)", section, re.MULTILINE)
        pages = [(title, os.path.normpath(os.path.join("docs", link))) for title, link in links]
        sections.append((section.partition("\n")[0], pages))
    return sections


def toctree(caption: str, entries: list[tuple[str, str]]) -> str:
    lines = [f"{title} </{page.removesuffix('.md')}>" for title, page in entries]
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *lines, "```", ""])


def main(folder: Path) -> None:
    """Writes the site's folder anew."""
    shutil.rmtree(folder, ignore_errors=True)
    site = Site(folder)
    for path in tracked("*.md"):
        site.document(path, (ROOT / path).read_text())
    for path in tracked("docs/*.ipynb"):
        site.document(path, notebook((ROOT / path).read_text()))
    for path in tracked("docs/*.png"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, folder / path)
    api = write_api(ROOT, site.document)
    done: set[str] = set()
    while todo := sorted(site.sources - done):  # the page of a folder links to more of them
        site.source(todo[0])
        done.add(todo[0])
    sections = [("Start", [("Documentation", INDEX)]), *navigation((ROOT / INDEX).read_text())]
    trees = [toctree(caption, [(title, page_of(page)) for title, page in pages]) for caption, pages in sections]
    with (folder / "index.md").open("a") as index:
        index.write("".join([*trees, toctree("API", api)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
