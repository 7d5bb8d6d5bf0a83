"""The model card: README.md of an exported checkpoint, with the header that Hugging Face's tools read.

Everything in it comes from manifests in the store, from files next to them, and from MLflow's record of the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo.secret_values import masked
from tasks.sft_data.card import fenced, table
from tasks.sft_data.statistics import KEPT, STATISTICS, by
from tasks.sft_data.statistics import read as read_statistics
from tasks.store.manifest import Manifest

_INTERVAL = "_ci95"
_VERSIONS = ("r1flow", "torch", "transformers", "tokenizers")
_RESULTS = {"pass@1", "pass@k", "cons@k", "format", "language", "alignment"}
"""Metrics in the header. The card's own table has all metrics."""


@dataclass(frozen=True)
class About:
    """Contents of a card. `name`: as in the closing table. `lineage`: the checkpoint, followed by its ancestors.
    `metrics`: from `evaluation`, the newest evaluation of it. `made`: as returned by
    `tasks.tracking.lineage.provenance`."""

    name: str
    checkpoint: Manifest
    lineage: Sequence[Manifest]
    licence: str = "unknown"
    evaluation: Manifest | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    made: Mapping[str, str] = field(default_factory=dict)
    place: str = "."
    """The name to load it by with transformers: a hub repository, or a path."""
    plain: str | None = None
    """For a model without chat: its plain-text prompt template, containing {prompt}."""


def lineage(checkpoint: Manifest, known: Mapping[str, Manifest]) -> list[Manifest]:
    """The artifact and all its ancestors, nearest first, each once. `known`: digest -> manifest."""
    manifests = {checkpoint.digest: checkpoint}
    for manifest in _growing(manifests):
        for ref in manifest.inputs.values():
            if ref.digest in known:
                manifests.setdefault(ref.digest, known[ref.digest])
    return list(manifests.values())


def _growing(manifests: dict[str, Manifest]) -> Iterator[Manifest]:
    seen: set[str] = set()
    while waiting := [digest for digest in manifests if digest not in seen]:
        seen.add(waiting[0])
        yield manifests[waiting[0]]


def base_model(made_from: Sequence[Manifest]) -> str | None:
    """Hub name of the model at the start of the lineage; None for a folder or for a model trained from scratch."""
    for manifest in made_from:
        ref = manifest.inputs.get("model")
        if manifest.stage == "base" and ref and ref.path and not Path(ref.path).is_absolute():
            return ref.path
    return None


def card(about: About) -> str:
    """The card as text: header, summary, results, data, lineage, settings."""
    parts = [
        f"---\n{_header(about)}\n---",
        f"# {about.name}",
        _opening(about),
        _use(about),
        *_section("Results", _results(about)),
        *_section("Data", _data(about)),
        *_section("Made from", _lineage(about)),
        *_section("How it was made", _made(about)),
        *_section("Licence", _licence(about)),
    ]
    # Settings contain no secrets today, but manifests of an older version might, and a card is published.
    return masked("\n\n".join(part for part in parts if part)) + "\n"


def _section(title: str, text: str) -> list[str]:
    return [f"## {title}", text] if text else []


def _header(about: About) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type="held-out",
            dataset_name=f"held-out problems of {about.made.get('recipe', 'the recipe')}",
            metric_type=name,
            metric_value=round(value, 4),
        )
        for name, value in about.metrics.items()
        if name in _RESULTS
    ]
    data = ModelCardData(
        base_model=base_model(about.lineage),
        library_name="transformers",
        license=about.licence,
        pipeline_tag="text-generation",
        tags=["r1flow", "reasoning", about.checkpoint.stage],
        model_name=about.name if results else None,
        eval_results=results or None,
    )
    return data.to_yaml().strip()


def _opening(about: About) -> str:
    stage, provenance = about.checkpoint, about.made
    recipe = f" of the recipe `{provenance['recipe']}`" if "recipe" in provenance else ""
    steps = f" in {stage.steps_completed:,} steps" if stage.steps_completed else ""
    return (
        f"What the stage `{stage.stage}`{recipe} made{steps}, {stage.created[:10]}. A whole model: weights, tokenizer, "
        "chat template; adapters, if there were any, are merged into the weights."
    )


_USE = """\
```python
from transformers import pipeline

model = pipeline("text-generation", "{place}")
{prompt}
answer = model(prompt, max_new_tokens=512, return_full_text=False)[0]["generated_text"]
print(answer)
```"""


def _use(about: About) -> str:
    prompt = 'prompt = [{"role": "user", "content": "compute 3 + 4"}]'
    if about.plain is not None:
        prompt = f"template = {about.plain!r}\nprompt = template.replace('{{prompt}}', 'compute 3 + 4')"
    return _USE.format(place=about.place, prompt=prompt)


def _results(about: About) -> str:
    if about.evaluation is None:
        return "No evaluation in the store has looked at this checkpoint."
    rows = [
        [name, round(value, 4), _interval(about.metrics.get(name + _INTERVAL))]
        for name, value in about.metrics.items()
        if isinstance(value, (int, float))
    ]
    config = about.evaluation.config
    how = f"{config['samples_per_problem']} samples a problem, {_sampling(config['sampling'])}"
    level = f"{100 * config['confidence']:g}%"
    sentence = (
        f"Of evaluation `{about.evaluation.key[:12]}`, {about.evaluation.created[:10]}: held-out problems, {how}."
    )
    return f"{sentence}\n\n{table(['metric', 'value', f'{level} interval'], rows)}"


def _interval(bounds: Sequence[float] | None) -> str:
    return f"{bounds[0]:.4f} to {bounds[1]:.4f}" if bounds else ""


def _sampling(settings: Mapping[str, Any]) -> str:
    return f"temperature {settings['temperature']}, top-p {settings['top_p']}, {settings['max_new_tokens']} tokens"


def _data(about: About) -> str:
    parts = []
    for manifest in about.lineage:
        if STATISTICS in manifest.files:
            statistics = read_statistics(manifest.local(STATISTICS).parent)
            kept = by([line for line in statistics["lines"] if line["outcome"] == KEPT], "source")
            rows = [
                [source, sampled, kept.get((source,), 0), statistics["licences"][source]]
                for (source,), sampled in by(statistics["lines"], "source").items()
            ]
            parts.append(f"`{manifest.stage}`, with a card of its own:")
            parts.append(table(["source", "sampled", "examples", "licence"], rows))
        elif manifest.counts:
            parts.append(f"`{manifest.stage}`:")
            parts.append(table(["", ""], [list(pair) for pair in manifest.counts.items() if pair[1]]))
    return "\n\n".join(parts)


def _lineage(about: About) -> str:
    rows = []
    for manifest in about.lineage:
        inputs = ", ".join(f"{name} {ref.digest[:12]}" for name, ref in manifest.inputs.items())
        steps = manifest.steps_completed or ""
        rows.append([manifest.stage, manifest.digest[:12], manifest.created[:10], steps, inputs])
    return table(["stage", "digest", "made", "steps", "inputs"], rows)


def _made(about: About) -> str:
    rows = [[name, about.made[name]] for name in ("recipe", "flow", "overrides", "seed") if about.made.get(name)]
    rows += [["key", about.checkpoint.key], ["MLflow run", about.checkpoint.mlflow_run_id or "none"]]
    rows += [[f"exported with {name}", version(name)] for name in _VERSIONS]
    settings = fenced(json.dumps(about.checkpoint.config, indent=1, ensure_ascii=False), "json")
    return f"{table(['', ''], rows)}\n\nSettings of the stage:\n\n{settings}"


def _licence(about: About) -> str:
    remarks = {"unknown": "Not known: name one with `--licence` when you export it again."}
    origin = base_model(about.lineage)
    of_base = f" The base model is {origin}; its licence holds for what was made from it." if origin else ""
    return remarks.get(about.licence, f"`{about.licence}`, as the person said who exported it.") + of_base
