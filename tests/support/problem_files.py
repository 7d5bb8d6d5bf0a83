"""Problems of a file source, as a test reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo.errors import InputError
from tasks.problems.load import LoadResult, load
from tasks.problems.sources import FileSource


def from_file(path: Path, **settings: Any) -> LoadResult:
    return load(FileSource(path=path, **settings), seed=0)


def failure(path: Path, **settings: Any) -> str:
    """The one line that refuses a file."""
    with pytest.raises(InputError) as caught:
        from_file(path, **settings)
    message = str(caught.value)
    assert "\n" not in message
    return message
