"""The benchmark's home is what it says: whole artifacts of real keys, most of them history."""

from __future__ import annotations

from pathlib import Path

from benchmarks import store_load
from tasks.store.audit import audit
from tasks.store.prune import plan_pruning
from tasks.store.store import Store


def test_the_home_is_whole_and_most_of_it_is_history(tmp_path: Path) -> None:
    number = store_load.build(tmp_path, 1)
    store = Store(tmp_path)
    assert len(store.list()) == number and list(audit(store)) == []
    pruning = plan_pruning(store, {}, [])
    kept = number // store_load.CHANGES  # the last of the runs of one seed
    assert len(pruning.artifacts) == number - sum(pruning.kept.values()) and sum(pruning.kept.values()) == kept


def test_the_page_has_a_row_for_each_command() -> None:
    row = {"command": "plan", "artifacts": 11, "seconds": 3.0, "cpu_s": 2.5, "empty_cpu_s": 2.0}
    assert "| `r1 plan` | 11 | 3.00 | 2.50 | 2.00 | 0.50 |" in store_load.page(11, [row])
