"""The data sections of a report: what was dropped and why, and the quality of the judge and reward models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.sft_data import statistics as data_statistics
from tasks.store.manifest import Manifest


def funnels(manifests: Mapping[str, Manifest]) -> list[dict[str, Any]]:
    """Funnels of problems, demonstrations and SFT data: rows before, rows dropped by reason, rows after."""
    sections = []
    if problems := manifests.get("problems"):
        sections.append(_problem_funnel(problems.counts))
    if cold := manifests.get("cold_start_data"):
        counts = dict(cold.counts)
        counts.pop("trajectories_chosen", None)  # each of them was rewritten, and is kept or dropped
        rows = [("kept", counts.pop("kept", 0)), *sorted(counts.items(), key=lambda item: -item[1])]
        sections.append(_funnel("Demonstrations of the cold start", "sampled or written", rows[1:] + rows[:1]))
    if (sft := manifests.get("sft_data")) and data_statistics.STATISTICS in sft.files:
        statistics = data_statistics.read(sft.local(data_statistics.STATISTICS).parent)
        (_, _, *columns), (_, *lines) = data_statistics.funnel(statistics["lines"], "part")
        funnel = _funnel("SFT data", "sampled", [(name, total) for name, total, *_ in lines])
        funnel["columns"] = columns
        for row, line in zip(funnel["rows"], lines, strict=True):
            row["values"] = line[2:]
        funnel["tokens"] = statistics["tokens"]["parts"]
        funnel["warnings"] = statistics["warnings"]
        sections.append(funnel)
    return sections


_DOMAINS = ("reasoning", "general")


def _problem_funnel(counts: Mapping[str, int]) -> dict[str, Any]:
    sums: Counter[str] = Counter()
    for name, count in counts.items():
        if name.startswith("source"):
            sums[name.partition("_")[2]] += count
    held_out = {f"held out, {d}": counts.get(f"{d}_held_out", 0) for d in _DOMAINS}
    validation = {f"validation, {d}": n for d in _DOMAINS if (n := counts.get(f"{d}_validation")) is not None}
    train = {f"to train on, {d}": counts.get(f"{d}_train", 0) for d in _DOMAINS}
    dropped = {
        "duplicate": sums["duplicates"] + counts.get("duplicates_across_sources", 0),
        "unverifiable": sums["unverifiable"],
        "bad record": sums["bad_records"],
        "shared with the held-out": _shared(counts, "decontamination_"),
        "shared with validation": _shared(counts, "validation_"),
        "shared with a test set": _shared(counts, "test_"),
    }
    kept = {**held_out, **validation, **train}
    # Everyday prompts that are held out are a list of their own, which is not among the read ones.
    everyday = held_out["held out, general"] if "everyday_held_out_seen" in counts else 0
    rest = sums["read"] + everyday - sum(dropped.values()) - sum(kept.values())
    # The stage does not count the validation problems that it drops.
    surplus = "held out beyond the maximum" + (", or validation shared with others" if validation else "")
    rows = [(k, v) for k, v in dropped.items() if v] + ([(surplus, rest)] if rest > 0 else [])
    return _funnel("Problems", "read", [*rows, *kept.items()])


def _shared(counts: Mapping[str, int], prefix: str) -> int:
    """The training problems that were dropped because they share words with others."""
    return sum(n for name, n in counts.items() if name.startswith(prefix) and name.endswith(("_equal", "_overlapping")))


def _funnel(title: str, whole: str, rows: Sequence[tuple[str, int]]) -> dict[str, Any]:
    total = sum(count for _, count in rows)
    return {
        "title": title,
        "whole": f"{total:,} {whole}",
        "columns": [],
        "tokens": {},
        "warnings": [],
        "rows": [
            {
                "name": name.replace("_", " "),
                "count": count,
                "share": 100 * count / total if total else 0.0,
                "kept": name == data_statistics.KEPT or name.startswith("to train on"),
                "values": [],
            }
            for name, count in rows
        ],
    }


_JUDGED = {
    "judge_agreement": "agrees with the rules on verified answers",
    "judge_undecided_share": "could not decide",
    "judge_repaired_share": "replies that had to be repaired or asked for again",
    "judge_position_bias": "pairs whose winner changed with their order",
    "judge_first_share": "first response wins",
    "judge_first_wins": "first response wins",
    "judge_orders_agree": "both orders agree",
    "judge_longer_wins": "longer response wins",
    "judge_length_correlation": "correlation of length and verdict",
    "helpful_held_out_accuracy": "helpful model: held-out pairs right",
    "helpful_held_out_calibration_error": "helpful model: calibration error",
    "safe_held_out_accuracy": "safety model: held-out labels right",
    "safe_held_out_calibration_error": "safety model: calibration error",
}
_NO_SHARES = ("correlation", "calibration_error")


def judges(manifests: Mapping[str, Manifest]) -> list[dict[str, Any]]:
    """Metrics of the judge and of the models trained on its judgments, by stage."""
    rows = []
    for stage in (name for name in manifests if name == "sft_data" or name.startswith("reward_models")):
        metrics = manifests[stage].metrics
        for name, title in _JUDGED.items():
            if (value := metrics.get(name)) is not None:
                bounds = [metrics.get(f"{name}_{side}") for side in ("low", "high")]
                texts = [_share(name, bound) for bound in bounds if bound is not None]
                row = {"stage": stage, "title": title, "value": _share(name, value), "interval": " to ".join(texts)}
                rows.append(row)
    return rows


def _share(name: str, value: float) -> str:
    return f"{value:.2f}" if name.endswith(_NO_SHARES) else f"{100 * value:.1f}%"
