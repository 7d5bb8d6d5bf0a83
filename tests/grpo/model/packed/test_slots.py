"""Which slot of a shared prompt is read."""

from __future__ import annotations

import torch

from grpo.model.packed.attention import _last_of_each


def test_the_last_slot_of_a_token_is_taken_by_any_number_of_threads() -> None:
    assert _last_of_each(torch.tensor([2, 0, 1, 0]), torch.tensor([0, 1, 3, 4]), 3).tolist() == [4, 3, 0]
    tokens = torch.arange(50_000).repeat(8)
    slots = torch.arange(len(tokens))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            assert torch.equal(_last_of_each(tokens, slots, 50_000), slots[-50_000:])
    finally:
        torch.set_num_threads(before)
