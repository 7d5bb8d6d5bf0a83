"""The file of `benchmarks/gpu.py --json`: the machine, and for each part its result with the commit that it is of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from arguments import write_output

NO_TIME = "no_time"
"""Field of the results: parts that were asked for, but had no time."""

Results = dict[str, Any]


def read_results(path: Path) -> Results:
    """What a file has.

    Raises:
        ValueError: it is no such file.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: no JSON: {error}; give another file") from None
    if not isinstance(results, dict) or not isinstance(results.get("machine"), str):
        raise ValueError(f"{path}: no results of benchmarks/gpu.py, which name their machine; give another file")
    return results


def earlier(path: Path | None, machine: str) -> Results:
    """The parts that a file has from earlier runs.

    Raises:
        ValueError: it is no file of results, or another machine's.
    """
    if path is None or not path.exists():
        return {"machine": machine}
    results = read_results(path)
    if results["machine"] != machine:
        raise ValueError(f"{path}: its results are of {results['machine']}, not of {machine}; give another file")
    results.pop(NO_TIME, None)
    return results


def keep(results: Results, file: Path | None) -> None:
    if file is not None:
        write_output(file, json.dumps(results, indent=1))
