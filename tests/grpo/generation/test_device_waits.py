"""A decoding step never waits for the device; how often sampling looks at which completions have ended.

PyTorch's meta device stands in for a GPU (`tests.support.device_waits`). Transformers' `generate` waits each step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from grpo.config.common import Sampling
from grpo.generation import sampler
from grpo.generation.draw_tokens import draw_tokens
from grpo.generation.sampler import sample
from grpo.model.decoder import Decoder
from grpo.model.packed.attention import NAME
from tests.support.device_waits import CAUSAL_BIAS, DeviceWaits, causal_mask
from tests.support.small_models import SHAPE

PROMPTS = [[5, 9, 7, 6, 11], [8, 3], [4, 4, 4, 10, 12, 3, 7, 5]]
META = torch.device("meta")


@pytest.fixture(params=["llama", "gemma2"])
def on_meta(request: pytest.FixtureRequest, model_folder: str, tmp_path: Path) -> Any:
    """Plain attention; and windows of 4 tokens with softcaps."""
    if request.param == "gemma2":
        Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=8, sliding_window=4)).save_pretrained(tmp_path)
        model_folder = str(tmp_path)
    return AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation=NAME).to("meta")


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@torch.inference_mode()
def test_a_decoding_step(on_meta: Any, top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CAUSAL_BIAS, causal_mask)
    settings = Sampling(max_new_tokens=32, top_p=top_p, temperature=0.7)
    decoder, rows = Decoder(on_meta), sampler._Rows(32, META)
    with DeviceWaits() as waits:
        for number in range(2):  # the second group joins while the first goes on: rows of different lengths
            logits = decoder.add_groups(PROMPTS[number : number + 1], 3).repeat_interleave(3, 0)
            rows.join([number], 3, [number])
            before = logits.new_empty(3 * number, logits.shape[1])
            tokens = rows.draw(torch.cat([before, logits]).float(), settings, decoder.fused)
            for _ in range(3):
                rows.ended(2)
                tokens = rows.draw(decoder.step(tokens).float(), settings, decoder.fused)
        kept = decoder.remove([0, 4])
        rows.keep(kept)
        assert decoder.step(tokens[: len(kept)]).shape[0] == 4
    assert waits.found == []


def test_a_look_is_one_wait_and_comes_every_eight_steps() -> None:
    rows = sampler._Rows(100, META)
    rows.join([0], 4, [0])
    with DeviceWaits() as waits:
        for _ in range(24):
            rows.draw(torch.zeros(4, 50, device="meta"), Sampling(max_new_tokens=100), False)
            rows.ended(2)
    assert waits.found == [("aten._to_copy", (4,))] * 3


def test_a_wait_is_seen() -> None:
    logits = torch.zeros(4, 50, device="meta")
    with DeviceWaits() as waits:
        bool((logits > 0).any())
        logits.argmax(1).tolist()
        logits.argmax(1).cpu()
        logits[torch.tensor([1, 2])]
    assert [name for name, _ in waits.found] == [
        "aten._local_scalar_dense",
        "aten._to_copy",
        "aten._to_copy",
        "aten.index",
    ]


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_completions_do_not_depend_on_the_steps_between_looks(
    policy: Any, monkeypatch: pytest.MonkeyPatch, top_p: float
) -> None:
    settings = Sampling(max_new_tokens=13, batch_size=6, top_p=top_p)  # two of three groups at a time
    often = torch.tensor(
        [t for g in sample(policy, PROMPTS, 3, settings, eos_id=-1, seeds=[1, 2, 3]) for c in g for t in c.tokens]
    )
    options: dict[str, Any] = dict(eos_id=int(often.mode().values), seeds=[1, 2, 3])
    expected = sample(policy, PROMPTS, 3, settings, **options)
    monkeypatch.setattr(sampler, "LOOKS", {"cpu": 5})
    actual = sample(policy, PROMPTS, 3, settings, **options)
    lengths = {len(c.tokens) for group in expected for c in group}
    assert len(lengths) > 2 and {c.finished for group in expected for c in group} == {True, False}
    for ours, theirs in zip(actual, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (one.tokens, one.finished) == (other.tokens, other.finished)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_top_p_draws_the_same_where_all_tokens_are_sorted() -> None:
    """A GPU sorts all of them; a CPU the most probable 1,024 first."""
    logits, uniforms = (
        torch.randn(6, 3000, generator=torch.Generator().manual_seed(0)) * 4,
        torch.linspace(0, 0.99, 6).double(),
    )
    few = draw_tokens(logits, Sampling(max_new_tokens=1, top_p=0.9), uniforms)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo.generation.draw_tokens.CANDIDATES", 3000)
        whole = draw_tokens(logits, Sampling(max_new_tokens=1, top_p=0.9), uniforms)
    assert few[0].tolist() == whole[0].tolist()
