"""People's decisions about gates, stored next to the artifact store so that nobody is asked twice about the same
evidence."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path


@dataclass(frozen=True)
class Decision:
    """Who approved or refused a failed gate, when and why, and the digest of the evidence that they saw."""

    gate: str
    approved: bool
    who: str
    note: str
    evidence: str
    when: str

    @classmethod
    def now(cls, gate: str, approved: bool, who: str, note: str, evidence: str) -> Decision:
        return cls(gate, approved, who, note, evidence, datetime.now(UTC).isoformat(timespec="seconds"))


class Decisions:
    """The decisions in the folder `gates` of `home`: one file per key from `tasks.gates.conditions.decision_key`, one
    line per decision."""

    def __init__(self, home: Path):
        self.folder = home / "gates"

    def of(self, key: str) -> list[Decision]:
        """Decisions about this gate and these artifacts, oldest first."""
        path = self.folder / f"{key}.jsonl"
        if not path.is_file():
            return []
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        return [Decision(**json.loads(line)) for line in lines if line.endswith("\n")]  # skips a partial line

    def approval(self, key: str, evidence: str) -> Decision | None:
        """The decision that approved the gate on this evidence (its digest), or None. An approval is final; a refusal
        can be reconsidered. What is made again under the same key may differ, and then nobody has approved it."""
        return next((d for d in self.of(key) if d.approved and d.evidence == evidence), None)

    def add(self, key: str, decision: Decision) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{key}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(decision), ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
