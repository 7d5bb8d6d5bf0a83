"""FlexAttention over packs, on a CPU: the same outputs as attention by rows. It has no backward pass there."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import sliding_window_causal_mask_function

from grpo.model.packed.flex import with_flex
from grpo.model.packed.packing import pack
from grpo.model.packed.scores import ScoreOptions, VisibleTokens

PROMPTS = [[5, 6, 7], [5, 6, 7], [5, 6, 7], [8, 9], [4] * 70, [4] * 70]
RESTS = [[1, 2], [3] * 80, [4], [1, 2, 3], [5, 6], [7]]
"""A prompt whose completions are attended to in two calls, one with a single completion, and one that is longer."""
WINDOW = VisibleTokens(sliding_window_causal_mask_function(3), 3)


@pytest.mark.parametrize(
    "options",
    [
        ScoreOptions(0.5),
        ScoreOptions(0.5, window=WINDOW),
        ScoreOptions(0.5, softcap=2.0),
        ScoreOptions(0.5, window=WINDOW, softcap=2.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    ],
    ids=["plain", "window", "softcap", "all with sinks"],
)
def test_outputs_are_those_of_the_rows(options: ScoreOptions) -> None:
    packed = pack(PROMPTS, RESTS, torch.device("cpu"))
    count = packed.ids.shape[1]
    random = torch.Generator().manual_seed(0)
    states = [torch.randn(count, heads, 16, generator=random) for heads in (4, 2, 2)]
    expected = packed.attention.attend(0, *states, options)
    with with_flex():
        torch.testing.assert_close(packed.attention.attend(0, *states, options), expected, atol=1e-5, rtol=1e-4)


def test_who_sees_whom() -> None:
    """Two completions of a prompt of two tokens: each sees the prompt and itself, not the other."""
    packed = pack([[5, 6], [5, 6]], [[1], [2, 3]], torch.device("cpu"))
    tokens = torch.arange(5)
    seen = packed.attention.flex.sees(None)(0, 0, tokens[:, None], tokens)
    assert packed.ids.tolist() == [[5, 6, 1, 2, 3]]
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
