"""Every causal model type of the installed transformers, built tiny: is it right, packed or plain, or refused?

    python -m benchmarks.architectures [TYPE ...] [--device cuda] [--json FILE] [--write docs/models.md]

Each model has random weights and the kinds of settings that real checkpoints carry: windows, chunks and rotary limits
shorter than the sequences, scaled and capped logits, several key heads, experts. It is loaded as a stage loads it. What
it computes is then held against transformers' own forward pass over one sequence at a time: log-probabilities with
shared prompts, gradients of all parameters, the log-probabilities that sampling reports, and a save and load.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks import architectures_trained
from benchmarks.arguments import output_file, write_output
from benchmarks.machine import made_with
from benchmarks.tiny_models import (
    COMPLETIONS,
    PROMPT_ROWS,
    PROMPTS,
    WRONG,
    alone,
    build,
    exact_gradients,
    expected_of,
    gradient_error,
    gradients_of,
)
from benchmarks.tiny_settings import OF_TYPE
from grpo.config.common import Hardware, Sampling
from grpo.errors import InputError
from grpo.generation.sampler import sample
from grpo.model.lm_head import backbone_of
from grpo.model.loading import load_policy
from grpo.model.logprobs import completion_logprobs
from grpo.model.packed.attention import is_packed

WAYS = ("packed", "plain", "refused", "not built", "wrong")
SAMPLES_DIFFER = {
    "deepseek_v32": "two keys whose scores differ by 2e-7: rounding decides which is among the eight that count",
    "llama:dynamic": "generate keeps keys that were rotated for the length that the sequence had then",
    "zamba2": "transformers' own decoding differs from its forward pass as much, in float64 too",
}
"""Types sampled by transformers' `generate` that may differ from its forward pass, and why."""
VERSIONS = f"transformers {transformers.__version__}, torch {torch.__version__}"
MARK = "<!-- the rest is written by `make architectures` -->"


@dataclass
class Row:
    """Results for one model type."""

    type: str
    way: str  # one of WAYS
    logprobs: float | None = None
    gradients: float | None = None
    samples: float | None = None
    saved: float | None = None
    lora: float | None = None
    checkpointing: float | None = None
    processes: float | None = None
    note: str = ""

    @property
    def figures(self) -> list[float | None]:
        """The differences, in the order of the table's columns."""
        compared = [self.logprobs, self.gradients, self.samples, self.saved]
        return [*compared, self.lora, self.checkpointing, self.processes]


def examine(kind: str, device: str = "cpu") -> Row:
    """All checks of one model type, in float32."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        try:
            build(kind, folder)
            own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").to(device).eval()
        except Exception as error:
            return Row(kind, "not built", note=_one_line(error))
        reasons: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: reasons.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("grpo.model.loading").addHandler(handler)
        try:
            policy = load_policy(str(folder), Hardware(device=device))
        except InputError as error:
            return Row(kind, "refused", note=str(error).replace(str(folder), "").strip(": "))
        except Exception as error:  # what users would see as a traceback
            return Row(kind, "wrong", note=_one_line(error))
        finally:
            logging.getLogger("grpo.model.loading").removeHandler(handler)
        row = Row(kind, "packed" if is_packed(backbone_of(policy)) else "plain")
        if reasons:
            row.note = reasons[0].partition(": ")[2].partition(": slower")[0]
        try:
            _compare(own, policy, row)
            saved = Path(place) / "saved"
            policy.save_pretrained(saved)
            again = AutoModelForCausalLM.from_pretrained(saved, attn_implementation="eager").to(device).eval()
            with torch.no_grad():
                difference = alone(again, PROMPTS[0], [7] * 12) - alone(own, PROMPTS[0], [7] * 12)
            row.saved = difference.abs().max().item()
            if kind in architectures_trained.TYPES:
                try:
                    row.lora = architectures_trained.lora_error(folder, device)
                except InputError as error:
                    row.note += f"; LoRA refused: {str(error).replace(str(folder), '').partition('(')[2]}"
                row.checkpointing = architectures_trained.checkpointing_error(folder, device)
        except Exception as error:
            row.way, row.note = "wrong", _one_line(error)
            return row
        found = [row.logprobs, row.gradients, row.saved, row.samples]
        if kind in architectures_trained.TYPES:
            found.append(row.checkpointing)
            found += [] if row.lora is None else [row.lora]
        if kind in SAMPLES_DIFFER and row.samples is not None and not row.samples <= WRONG:
            found.remove(row.samples)
            row.note = "; ".join(filter(None, [row.note, f"samples: {SAMPLES_DIFFER[kind]}"]))
        if any(value is None or not value <= WRONG for value in found):
            row.way = "wrong"
        return row


def _compare(own: Any, policy: Any, row: Row) -> None:
    expected, gradients = expected_of(own)
    logprobs = completion_logprobs(policy, PROMPT_ROWS, COMPLETIONS, 1.0)
    logprobs.sum().backward()
    row.logprobs = _largest(line[: len(e)] - e for line, e in zip(logprobs.detach(), expected, strict=True))
    found = gradients_of(policy)
    row.gradients = gradient_error(gradients, found)
    if row.gradients > WRONG:  # transformers' own may be the ones that rounding moved, over a kink of an activation
        exact = exact_gradients(own)
        if exact and (error := gradient_error(exact, found)) <= WRONG:
            theirs = gradient_error(exact, gradients)
            row.gradients = error
            note = f"gradients against float64; transformers' own float32: {theirs:.0e}"
            row.note = "; ".join(filter(None, [row.note, note]))
    settings = Sampling(max_new_tokens=14, temperature=1.0)
    groups = sample(policy, PROMPTS, 3, settings, eos_id=2, seeds=[3, 4])
    with torch.no_grad():
        row.samples = _largest(
            torch.tensor(c.logprobs) - alone(own, prompt, c.tokens).cpu()
            for prompt, group in zip(PROMPTS, groups, strict=True)
            for c in group
        )


def _largest(differences: Iterable[Tensor]) -> float:
    """Of all, in absolute value; NaN if one is."""
    return torch.stack([difference.abs().max() for difference in differences]).max().item()


def _train_in_parallel(rows: list[Row]) -> None:
    """Fills in what two processes differ by."""
    errors = architectures_trained.parallel_errors([row.type for row in rows]) if rows else {}
    for row in rows:
        found = errors[row.type]
        if isinstance(found, str):
            row.way, row.note = "wrong", f"two processes: {found}"
        else:
            row.processes = found
            row.way = row.way if found <= WRONG else "wrong"
        print(f"{row.type:28} two processes {_figure(row.processes)} {row.note if isinstance(found, str) else ''}")


def _origin(device: str) -> dict[str, str]:
    """What rows of one table have in common."""
    return {**made_with(), "device": device, "versions": VERSIONS}


def _found(file: Path | None, origin: dict[str, str]) -> list[Row]:
    """Rows of an earlier run that was cut off.

    Raises:
        ValueError: it is no such file, or one of another commit, machine, device or version.
    """
    if file is None or not file.exists():
        return []
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        others = {name: kept["origin"][name] for name in origin if kept["origin"][name] != origin[name]}
        rows = [Row(**row) for row in kept["rows"]]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file} has no rows of this benchmark; give another file") from None
    if others:
        named = ", ".join(f"{name} {value}" for name, value in others.items())
        raise ValueError(f"{file}: its rows are of another run ({named}); give another file")
    return rows


def _keep(rows: list[Row], file: Path | None, origin: dict[str, str]) -> None:
    if file:
        write_output(file, json.dumps({"origin": origin, "rows": [asdict(row) for row in rows]}, indent=1))


def _one_line(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", 140)


def _page(rows: list[Row], commit: str) -> str:
    """The table in Markdown, with the versions and a count of each way."""
    counts = Counter(row.way for row in rows)
    lines = [
        f"{VERSIONS}, commit {commit}: " + ", ".join(f"{counts[way]} {way}" for way in WAYS) + ".",
        "",
        "| type | way | log-probabilities | gradients | samples | saved | LoRA | recomputed | two processes | note |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        figures = [_figure(value) for value in row.figures]
        lines.append(f"| {row.type} | {row.way} | {' | '.join(figures)} | {row.note.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.0e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=output_file, help="write the rows here, and keep those it has")
    parser.add_argument("--write", type=output_file, help="replace the table of this page")
    args = parser.parse_args()
    every = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *(name for name in OF_TYPE if ":" in name)]
    if unknown := sorted({*args.types} - {*every}):
        parser.error(f"{', '.join(unknown)}: no causal model types of transformers {transformers.__version__}")
    origin = _origin(args.device)
    try:
        rows = _found(args.json, origin)
    except (OSError, ValueError) as error:
        parser.error(f"--json: {error}")
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    missing = {*(args.types or every)} - {row.type for row in rows}
    for kind in sorted(missing):
        row = examine(kind, args.device)
        rows.append(row)
        _keep(rows, args.json, origin)
        print(f"{row.type:28} {row.way:8} {' '.join(_figure(v) or '-' for v in row.figures):40} {row.note}", flush=True)
    rows.sort(key=lambda row: row.type)
    _train_in_parallel([row for row in rows if row.checkpointing is not None and row.processes is None])
    _keep(rows, args.json, origin)
    if args.write:
        before = args.write.read_text().partition(MARK)[0] if args.write.exists() else ""
        write_output(args.write, f"{before}{MARK}\n\n{_page(rows, origin['commit'])}")
    wrong = [row.type for row in rows if row.way == "wrong"]
    print(f"{len(rows)} types, wrong: {len(wrong)} {' '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
