"""Examples from a data set, as Markdown, shown to a person at a gate with a review."""

from __future__ import annotations

from pathlib import Path

from grpo.errors import InputError
from tasks.sft_data.card import fenced
from tasks.sft_data.examples import shown_examples
from tasks.store.manifest import Manifest

_FOLDERS = ("examples/train", "examples")
_LONGEST = 6000
"""Maximum number of characters of a text that are shown."""


def review_samples(manifest: Manifest, count: int) -> tuple[str, ...]:
    """Up to `count` examples of the data set in an artifact, evenly spaced.

    A model wrote them, so each text is in a code block that it cannot close.

    Raises:
        InputError: the stage writes no examples.
    """
    shards = [Path(name) for name in manifest.files if name.endswith(".parquet")]
    folder = next((manifest.local(name) for name in _FOLDERS if Path(name) in {s.parent for s in shards}), None)
    if folder is None:
        raise InputError(f"a gate reviews samples of {manifest.stage}, which writes no examples; drop its review")
    return tuple(
        "\n\n".join(
            [f"### Sample {number}", *(f"{name}:\n\n{fenced(text, longest=_LONGEST)}" for name, text in sample.items())]
        )
        for number, sample in enumerate(shown_examples(folder, count), 1)
    )
