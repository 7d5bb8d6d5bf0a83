"""The card of an exported data set: the one that the stage wrote, or else one made from its manifest and files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow.parquet as pq

from grpo.secret_values import masked
from tasks.export.folder import CARD
from tasks.sft_data.card import PLACE, fenced, table
from tasks.store.manifest import Manifest

_USE = """\
```python
import datasets

data = datasets.load_dataset("{place}")  # {splits}
{more}print(data)
```"""
_FOR_GRPO = """\
# TRL's GRPOTrainer reads `prompt`, and hands the other columns to its reward functions.
data = data.rename_columns({"messages": "prompt", "answer": "solution"})
"""


def data_card(data: Manifest, splits: Mapping[str, str], licence: str | None, place: str) -> str:
    """The card as text. `splits`: name -> pattern of its Parquet files; splits without matching files are left out.
    `place`: the argument for `datasets.load_dataset`. If a licence is given, it replaces the one in the data's own
    card."""
    from huggingface_hub import DatasetCard

    if CARD in data.files:
        text = data.local(CARD).read_text(encoding="utf-8").replace(f'("{PLACE}")', f'("{place}")')
        if licence is not None:
            card = DatasetCard(text)
            card.data["license"] = licence
            text = str(card)
        return masked(text)
    return masked(_made(data, splits, licence or "unknown", place))


def _made(data: Manifest, splits: Mapping[str, str], licence: str, place: str) -> str:
    from huggingface_hub import DatasetCardData

    found = {name: sorted(data.local().glob(pattern)) for name, pattern in splits.items()}
    found = {name: files for name, files in found.items() if files}
    header = DatasetCardData(
        license=licence,
        task_categories=["text-generation"],
        tags=["r1flow", "reasoning", data.stage],
        configs=[
            {"config_name": "default", "data_files": [{"split": name, "path": splits[name]} for name in found]},
        ],
    )
    rows: list[list[Any]] = [
        [name, sum(pq.read_metadata(file).num_rows for file in files), ", ".join(pq.read_schema(files[0]).names)]
        for name, files in found.items()
    ]
    inputs = [[name, ref.digest[:12]] for name, ref in data.inputs.items()]
    parts = [
        f"---\n{header.to_yaml().strip()}\n---",
        f"# {data.stage}",
        f"What the stage `{data.stage}` of a recipe of r1flow made, {data.created[:10]}.",
        _USE.format(place=place, splits=", ".join(found), more=_FOR_GRPO if data.stage == "problems" else ""),
        table(["split", "rows", "columns"], rows),
        "## Made from",
        table(["", ""], [["key", data.key], ["digest", data.digest], *inputs]),
        fenced(json.dumps(data.config, indent=1, ensure_ascii=False), "json"),
    ]
    return "\n\n".join(parts) + "\n"
