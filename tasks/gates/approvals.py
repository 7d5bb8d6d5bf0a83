"""People's decisions about gates, stored next to the artifact store so that nobody is asked twice about the same
evidence."""

from __future__ import annotations

import contextlib
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
        """Decisions about this gate and these artifacts, oldest first. A line that a kill cut off is skipped."""
        path = self.folder / f"{key}.jsonl"
        decisions = []
        for line in path.read_bytes().split(b"\n") if path.is_file() else []:
            with contextlib.suppress(ValueError):
                decisions.append(Decision(**json.loads(line)))
        return decisions

    def approval(self, key: str, evidence: str) -> Decision | None:
        """The decision that approved the gate on this evidence (its digest), or None. An approval is final; a refusal
        can be reconsidered. What is made again under the same key may differ, and then nobody has approved it."""
        return next((d for d in self.of(key) if d.approved and d.evidence == evidence), None)

    def add(self, key: str, decision: Decision) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{key}.jsonl").open("a+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a kill cut off the last line
                    file.write(b"\n")
            file.write(json.dumps(asdict(decision), ensure_ascii=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
