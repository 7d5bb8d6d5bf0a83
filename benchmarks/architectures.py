"""Every causal model type of the installed transformers, built tiny: is it right, packed or plain, or refused?

    python benchmarks/architectures.py [TYPE ...] [--device cuda] [--json FILE] [--write docs/models.md]

Each model has random weights and the kinds of settings that real checkpoints carry: windows, chunks and rotary limits
shorter than the sequences, scaled and capped logits, several key heads, experts. It is loaded as a stage loads it. What
it computes is then held against transformers' own forward pass over one sequence at a time: log-probabilities with
shared prompts, gradients of all parameters, the log-probabilities that sampling reports, and a save and load.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from grpo.config.common import Hardware, Sampling
from grpo.errors import InputError
from grpo.generation.sampler import sample
from grpo.model.head import backbone_of
from grpo.model.loading import decodes_exactly, load_policy
from grpo.model.logprobs import completion_logprobs
from grpo.model.packed.attention import is_packed

VOCABULARY = 96
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_layers": 4,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "multi_query": False,
    "head_dim": 8,
    "attention_head_dim": 8,
    "rotary_dim": 8,
    "d_kv": 8,
    "intermediate_size": 48,
    "n_inner": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "n_ctx": 128,
    "max_seq_len": 128,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "use_cache": True,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_n_heads": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_d_ssm": 64,
    "ssm_state_size": 8,
    "state_size": 8,
    "n_groups": 1,
    "chunk_size": 8,
    "conv_kernel": 4,
    "num_mem_blocks": 1,
    "vision_config": None,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "index_n_heads": 16,  # few have ties, which `topk` breaks by the length of the row
    "index_head_dim": 16,
    "index_topk": 8,
}
"""Sizes of the tiny models by field of their configurations, where they have it."""
EVERY_OTHER = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
MAMBA_OTHER = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
QWEN4 = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 2,
    "indexer_head_dim": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "hc_lowrank": 8,
    "ple_embed_dim": 32,
    "ngram_vocab_size_base": 64,
    "split_ngram_parts": 4,
    "make_ngram_vocab_size_divisible_by": 8,
}
ZAMBA = {
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
    "num_key_value_heads": 4,
    "layers_block_type": MAMBA_OTHER,
}
EVERY_LOCAL = ["global", "local", "global", "local"]
OF_TYPE: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.0625},
    "cohere2": {"logit_scale": 0.0625},
    "granite": {"logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1},
    "granitemoe": {"logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1},
    "granitemoeshared": {"logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1},
    "gemma2": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    "phi3": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 16,
            "short_factor": [1.0] * 4,
            "long_factor": [1.5, 2.0, 3.0, 4.0],
        }
    },
    "llama:dynamic": {
        "max_position_embeddings": 16,
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    },
    "bamba": {"attn_layer_indices": [2]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "gemma3n": {
        "layer_types": EVERY_OTHER,
        "num_kv_shared_layers": 2,
    },
    "gemma3n_text": {
        "layer_types": EVERY_OTHER,
        "num_kv_shared_layers": 2,
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8, "attention_layers": EVERY_LOCAL},
    "qwen4_exp": QWEN4,
    "qwen4_exp_text": QWEN4,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "cohere_compass_text": {
        "logit_scale": 0.0625,
        "layer_types": EVERY_OTHER,
        "rope_parameters": {name: {**ROPE, "mrope_section": [2, 1, 1]} for name in EVERY_OTHER},
    },
    "xlnet": {"d_head": 8, "d_inner": 48},
    "reformer": {
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [8, 24],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
    },
    "zamba": {**ZAMBA, "mamba_dt_rank": 2},
    "zamba2": {**ZAMBA, "hybrid_layer_ids": [1, 3], "n_mamba_heads": 4, "mamba_headdim": 16, "num_query_groups": 4},
    "xlstm": {"embedding_dim": 32, "num_blocks": 4, "ffn_round_up_to_multiple_of": 16},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "xmod": {"default_language": "en_XX"},
    "rwkv": {"attention_hidden_size": 32, "context_length": 128},
    "mamba2": {"head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
    "dots1": {"n_routed_experts": 4, "moe_intermediate_size": 24, "n_shared_experts": 1},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "falcon": {"alibi": False, "new_decoder_architecture": True},
    "bloom": {"hidden_size": 32, "n_head": 4},
}
"""Settings of real checkpoints beside the sizes, where these change what is computed."""
FILLED = ("head_dim", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
"""Fields that real configurations always have, by default None in some classes."""
PROMPTS = [[5, 9, 7, 6, 11, 23, 31, 8, 44, 17], [12, 60, 33]]
LENGTHS = [[19, 12, 25], [16, 21, 5]]
WRONG = 1e-3
"""Largest difference of a log-probability in nats, and of all gradients relative to their norm."""

LEFT_OUT = (
    "transformers_version",
    "model_type",
    "architectures",
    "dtype",
    "per_layer_config",
    "qk_layernorm_config",
    "_name_or_path",
    "output_attentions",
)
"""Fields that a configuration derives from others."""
WAYS = ("packed", "plain", "refused", "not built", "wrong")
MARK = "<!-- the rest is written by `make architectures` -->"


@dataclass
class Row:
    """What was found for one model type."""

    type: str
    way: str  # one of WAYS
    logprobs: float | None = None
    gradients: float | None = None
    samples: float | None = None
    saved: float | None = None
    note: str = ""


def tiny_config(kind: str, **changes: Any) -> Any:
    """A configuration of a few thousand weights with the form of a real one."""
    config = CONFIG_MAPPING[kind.partition(":")[0]]()
    return type(config)(**_shrunk(config, {**OF_TYPE.get(kind, {}), **changes}))


def _shrunk(config: Any, changes: dict[str, Any]) -> dict[str, Any]:
    fields = {name: _value(config, name, value) for name, value in config.to_dict().items()}
    sub_configs = {name for name in getattr(config, "sub_configs", {}) if fields.get(name) is not None}
    smaller = {}
    old_layers = fields.get("num_hidden_layers")
    layers = next((SIZES[name] for name in ("num_hidden_layers", "n_layer", "num_layers") if name in fields), 4)
    for name, value in fields.items():
        if name in sub_configs:
            smaller[name] = {**_shrunk(getattr(config, name), changes), "model_type": getattr(config, name).model_type}
        elif name in SIZES and value is not None:
            smaller[name] = SIZES[name]
        elif (isinstance(value, list) and name != "layer_types" and len(value) == old_layers) or (
            name == "layer_types" and value
        ):
            smaller[name] = _some_of_each(value, layers)
        elif value is None and name in FILLED:
            smaller[name] = SIZES[name]
        elif name not in LEFT_OUT:
            smaller[name] = value
    if "kv_lora_rank" in fields:
        smaller |= {"num_key_value_heads": 4, "qk_head_dim": 16, "head_dim": 8}
    smaller.update({name: value for name, value in changes.items() if name in fields})
    smaller["dtype"] = "float32"
    return smaller


def _value(config: Any, name: str, written: Any) -> Any:
    try:
        return getattr(config, name, written)
    except Exception:  # a field that only layers have
        return written


def _some_of_each(kinds: list[str], count: int) -> list[str]:
    """`count` layers with each kind at least once, in the order of their first appearance."""
    first = list(dict.fromkeys(kinds))
    return [first[i * len(first) // count] if len(first) < count else first[i] for i in range(count)]


def build(kind: str, folder: Path, **changes: Any) -> None:
    """Writes a model with random weights, large enough that attention is far from uniform. `changes`: of its
    configuration."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            elif parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)


def alone(model: Any, prompt: list[int], completion: list[int]) -> Tensor:
    """Log-probabilities of a completion by transformers' forward pass over this sequence only."""
    from grpo.model.rope import reset_rope

    reset_rope(model)
    ids = torch.tensor([[*prompt, *completion]], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(1).gather(1, torch.tensor(completion, device=model.device)[:, None]).squeeze(1)


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
        except Exception as error:
            row.way, row.note = "wrong", _one_line(error)
            return row
        found = [row.logprobs, row.gradients, row.saved]
        if decodes_exactly(policy):
            found.append(row.samples)
        elif row.samples is not None and not row.samples <= WRONG:
            row.note += f"; sampling differs from the forward pass by {row.samples:.2g} nats, measured in each step"
        if any(value is None or not value <= WRONG for value in found):
            row.way = "wrong"
        return row


def _compare(own: Any, policy: Any, row: Row) -> None:
    random = torch.Generator().manual_seed(1)
    prompts = [prompt for prompt, lengths in zip(PROMPTS, LENGTHS, strict=True) for _ in lengths]
    completions = [
        torch.randint(3, VOCABULARY, (length,), generator=random).tolist() for lengths in LENGTHS for length in lengths
    ]
    expected = [alone(own, prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
    torch.cat(expected).sum().backward()
    logprobs = completion_logprobs(policy, prompts, completions, 1.0)
    logprobs.sum().backward()
    row.logprobs = max(
        (line[: len(e)] - e).abs().max().item() for line, e in zip(logprobs.detach(), expected, strict=True)
    )
    row.gradients = _gradient_error(dict(own.named_parameters()), dict(policy.named_parameters()))
    settings = Sampling(max_new_tokens=14, temperature=1.0)
    groups = sample(policy, PROMPTS, 3, settings, eos_id=2, seeds=[3, 4])
    with torch.no_grad():
        row.samples = max(
            (torch.tensor(c.logprobs) - alone(own, prompt, c.tokens).cpu()).abs().max().item()
            for prompt, group in zip(PROMPTS, groups, strict=True)
            for c in group
        )


def _gradient_error(own: dict[str, Any], policy: dict[str, Any]) -> float:
    """|g - g'| / |g| of all gradients as one vector."""
    pairs = [(one.grad, policy[name].grad, one) for name, one in own.items()]
    none = [torch.zeros_like(weight) for _, _, weight in pairs]
    ones = torch.cat([(zero if g is None else g).flatten() for (g, _, _), zero in zip(pairs, none, strict=True)])
    others = torch.cat([(zero if g is None else g).flatten() for (_, g, _), zero in zip(pairs, none, strict=True)])
    return ((ones - others).norm() / ones.norm()).item()


def _one_line(error: Exception) -> str:
    return textwrap.shorten(f"{type(error).__name__}: {error}", 140)


def _page(rows: list[Row]) -> str:
    """The table in Markdown, with the versions and a count of each way."""
    counts = Counter(row.way for row in rows)
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    lines = [
        f"{versions}, commit {commit()}: " + ", ".join(f"{counts[way]} {way}" for way in WAYS) + ".",
        "",
        "| type | way | log-probabilities | gradients | samples | saved | note |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        figures = [_figure(value) for value in (row.logprobs, row.gradients, row.samples, row.saved)]
        lines.append(f"| {row.type} | {row.way} | {' | '.join(figures)} | {row.note.replace('|', '/')} |")
    return "\n".join(lines) + "\n"


def commit() -> str:
    """The commit of the checkout, short."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.0e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--write", type=Path, help="replace the table of this page")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = []
    variants = [name for name in OF_TYPE if ":" in name]
    for kind in args.types or sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *variants]):
        row = examine(kind, args.device)
        rows.append(row)
        figures = " ".join(_figure(v) or "-" for v in (row.logprobs, row.gradients, row.samples, row.saved))
        print(f"{row.type:28} {row.way:8} {figures:28} {row.note}", flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if args.write:
        before = args.write.read_text().partition(MARK)[0]
        args.write.write_text(f"{before}{MARK}\n\n{_page(rows)}")
    wrong = [row.type for row in rows if row.way == "wrong"]
    print(f"{len(rows)} types, wrong: {len(wrong)} {' '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
