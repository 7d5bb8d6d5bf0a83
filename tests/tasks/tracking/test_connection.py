"""What a run says when MLflow cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo.errors import InputError
from tasks.tracking.connection import Connection, default_uri


def test_exhausted_memory_is_no_failure_of_mlflow(tmp_path: Path) -> None:
    def query(cause: Exception | None = None) -> None:
        raise RuntimeError("the database failed") from cause

    with pytest.raises(InputError, match="^memory ran out: end other programs"):
        Connection(default_uri(tmp_path)).or_stop(lambda: query(MemoryError()))
    with pytest.raises(InputError, match="^MLflow at sqlite:.* failed: "):
        Connection(default_uri(tmp_path)).or_stop(query)
