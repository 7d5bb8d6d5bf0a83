"""One real run of the whole recipe, smaller still than `tiny`, that the tests of the flows look at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.r1 import R1, SMALLER
from tests.support.small_home import SmallHome, make_small_home


@pytest.fixture(scope="session")
def r1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[R1]:
    yield R1(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def first_run(r1: R1) -> dict[str, Any]:
    """The output of `r1 run --json` for the first run in the session's home."""
    return {**r1.tiny("run"), "sets": SMALLER}


@pytest.fixture(scope="session")
def small_home(tmp_path_factory: pytest.TempPathFactory) -> SmallHome:
    """Two runs without a training, to read: see tests/support/small_home.py."""
    return make_small_home(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def r1flow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An installation that `r1 up` started; see tests/support/installation.py."""
    from tests.support.installation import Installation

    installation = Installation(tmp_path_factory.mktemp("up"))
    installation.up()
    yield installation
    installation.down()
