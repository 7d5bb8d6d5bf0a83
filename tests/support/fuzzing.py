"""Fuzz targets: a check of drawn inputs, as one test. A failure prints the smallest input that shows it.

By default a target sees the same 60 inputs each time, so that CI is repeatable. With FUZZ_SECONDS (`make fuzz`) it
goes on with new ones for so many seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

SHORT, ROUND = 60, 100
"""Inputs of the short form, and of a round of the long one."""


def fuzz(check: Callable[..., Any], record: Callable[[str, object], None], **inputs: SearchStrategy[Any]) -> None:
    """Calls ``check(**inputs)`` on drawn inputs; the number of them goes to `record`, pytest's record_property."""
    budget, count = float(os.environ.get("FUZZ_SECONDS", 0)), 0

    def counted(**values: Any) -> None:
        nonlocal count
        count += 1
        check(**values)

    def run(**options: Any) -> None:
        phases = (Phase.explicit, Phase.generate, Phase.shrink)
        common = settings(deadline=None, database=None, phases=phases, suppress_health_check=[*HealthCheck])
        number = options.pop("number", None)
        target = settings(common, **options)(given(**inputs)(counted))
        (target if number is None else seed(number)(target))()

    try:
        if not budget:
            run(max_examples=SHORT, derandomize=True)
        began = time.monotonic()
        while time.monotonic() - began < budget:
            run(max_examples=ROUND, number=time.time_ns())
    finally:
        record("inputs", count)
