"""The library, found through `grpo.other_environments`."""

from pathlib import Path

__path__ = [str(Path(__file__).parents[2])]
