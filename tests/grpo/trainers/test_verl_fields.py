"""Every setting of RL and SFT is translated for verl, read by this library beside it, refused, or known to change no
update. A new field fails these tests until it is in one of the tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from grpo.config.jobs import RLJob, SFTJob
from grpo.config.rl import RL
from grpo.config.supervised import SFT
from grpo.health.checks import HealthSettings
from grpo.trainers.verl.rl_settings import rl_settings
from grpo.trainers.verl.sft import sft_settings

VERL = {"kind": "verl", "python": "/opt/verl/bin/python"}
OPTIMIZER = {"learning_rate": 1e-3}
SPLIT = {"tensor": 2, "expert": 2}
Changes = dict[str, Any]


def megatron(**split: Any) -> Changes:
    trainer = {**VERL, "strategy": "megatron", "megatron": {**SPLIT, **split}}
    return {"hardware": {"processes": 8, "dtype": "bfloat16", "mixed_precision": True, "trainer": trainer}}


def hardware(**fields: Any) -> Changes:
    return {"hardware": fields}


def optimizer(**fields: Any) -> Changes:
    return {"optimizer": fields}


COMMON_TOLD: list[tuple[str, Changes, Changes]] = [
    ("micro_batch_tokens", {}, {"micro_batch_tokens": 999}),
    ("save_every", {}, {"save_every": 7}),
    ("optimizer.learning_rate", {}, optimizer(learning_rate=2e-3)),
    ("optimizer.final_learning_rate_share", {}, optimizer(final_learning_rate_share=0.5)),
    ("optimizer.warmup_steps", {}, optimizer(warmup_steps=2)),
    ("optimizer.weight_decay", {}, optimizer(weight_decay=0.1)),
    ("optimizer.adam_beta2", {}, optimizer(adam_beta2=0.9)),
    ("optimizer.max_grad_norm", {}, optimizer(max_grad_norm=2.0)),
    ("hardware.device", {}, hardware(device="cpu")),
    ("hardware.dtype", {}, hardware(dtype="bfloat16")),
    ("hardware.mixed_precision", hardware(dtype="bfloat16"), hardware(dtype="bfloat16", mixed_precision=True)),
    ("hardware.fused", {}, hardware(fused=False)),
    ("hardware.attention", hardware(dtype="bfloat16"), hardware(dtype="bfloat16", attention="plain")),
    ("hardware.gradient_checkpointing", {}, hardware(gradient_checkpointing=True)),
    ("hardware.remote_code", {}, hardware(remote_code=True)),
    ("hardware.processes", {}, hardware(processes=2)),
    ("hardware.nodes", {}, hardware(nodes=2)),
    ("hardware.sequence_parallel", hardware(processes=2), hardware(processes=2, sequence_parallel=2)),
    ("hardware.trainer.strategy", hardware(processes=8, dtype="bfloat16", mixed_precision=True), megatron()),
    ("hardware.trainer.megatron.tensor", megatron(), megatron(tensor=4)),
    ("hardware.trainer.megatron.pipeline", megatron(), megatron(pipeline=2)),
    ("hardware.trainer.megatron.context", megatron(), megatron(context=2)),
    ("hardware.trainer.megatron.expert", megatron(), megatron(expert=4)),
    ("hardware.trainer.megatron.expert_tensor", megatron(), megatron(expert_tensor=1)),
    ("hardware.trainer.megatron.offload", megatron(), megatron(offload=True)),
]
"""(field, settings before, settings after it is changed): verl is told another thing."""
RL_TOLD = [
    *COMMON_TOLD,
    ("prompts_per_step", {}, {"prompts_per_step": 8}),
    ("group_size", {}, {"group_size": 8}),
    ("minibatches", {}, {"minibatches": 2}),
    ("inner_epochs", {}, {"inner_epochs": 2}),
    ("objective", {}, {"objective": "dapo"}),
    ("clip_eps_low", {}, {"clip_eps_low": 0.1}),
    ("clip_eps_high", {}, {"clip_eps_high": 0.1}),
    ("kl_coef", {}, {"kl_coef": 0.5}),
    ("kl_estimator", {}, {"kl_estimator": "k1"}),
    ("advantage", {}, {"advantage": "rloo"}),
    ("std", {}, {"std": "sample"}),
    ("sampling.temperature", {}, {"sampling": {"max_new_tokens": 4, "temperature": 0.5}}),
    ("sampling.max_new_tokens", {}, {"sampling": {"max_new_tokens": 5}}),
    ("sampler_ratio_max", {}, {"sampler_ratio_max": 3.0}),
    ("max_new_tokens_from", {}, {"max_new_tokens_from": {0: 6}}),
]
SFT_TOLD = [*COMMON_TOLD, ("batch_size", {}, {"batch_size": 64})]

COMMON_REFUSED: dict[str, Changes] = {
    "lora": {"lora": {}},
    "optimizer.kind": optimizer(kind="adamw_8bit"),
    "validate_every": {"validate_every": 5},
    "hardware.tensor_parallel": hardware(processes=2, tensor_parallel=2),
}
RL_REFUSED: dict[str, Changes] = {
    **COMMON_REFUSED,
    "method": {"method": "dpo"},
    "kl_stale_correction": {"kl_stale_correction": True},
    "reference_mixing": {"reference_refresh_steps": 4, "reference_mixing": 0.5},
    "supervision": {"supervision": "process"},
    "engine": {"engine": {"kind": "local"}},
    "rollouts_ahead": {"rollouts_ahead": 1},
    "dynamic_sampling_rounds": {"dynamic_sampling_rounds": 2},
    "mask_truncated": {"mask_truncated": True},
    "curriculum": {"curriculum": {}},
    "experts": {"experts": {"routers": "train"}},
    "hardware.sampler": hardware(sampler="own"),
    "sampling.top_p": {"sampling": {"max_new_tokens": 4, "top_p": 0.5}},
    "health.kl_budget.limit": {"health": {"kl_budget": {"limit": 5.0}}},
}

UNMEASURED = ("kl_budget", "mismatch_growth")
"""Health checks of metrics that verl does not give."""

COMMON_HERE = {
    "hardware.trainer.kind": "chooses verl",
    "hardware.trainer.python": "starts it",
    "hardware.trainer.version": "is compared with the one that is there",
    "hardware.trainer.options": "come last on its command line",
}
RL_HERE = {
    **COMMON_HERE,
    "steps": "ends the last run of verl",
    "reference_refresh_steps": "ends a run of verl; the next one has the new reference",
    **dict.fromkeys(("source_weights", "general_last_steps", "general_share"), "order the prompts"),
    **dict.fromkeys(("rewards", "reward_models", "uncertainty_penalty", "branch_weights"), "score completions"),
    **dict.fromkeys(("judge", "scoring"), "score completions"),
    **dict.fromkeys((f"health.{name}" for name in HealthSettings.model_fields if name not in UNMEASURED), "is checked"),
    "samples_every": "chooses completions to read",
}
SFT_HERE = {**COMMON_HERE, **dict.fromkeys(("epochs", "max_steps", "max_tokens"), "make the batches")}

OF_VALIDATION = dict.fromkeys(("validation", "keep"), "belongs to validate_every, which is refused")
RL_WITHOUT_EFFECT = {
    **OF_VALIDATION,
    **dict.fromkeys(("ppo", "dpo"), "belongs to a method that is refused"),
    "step_reward": "belongs to supervision 'process', which is refused",
    **dict.fromkeys(("health.kl_budget.steps", "health.kl_budget.action"), "belongs to a limit, which is refused"),
    "health.mismatch_growth": "verl does not say how far the log-probabilities of its sampler and trainer differ",
    "sampling.batch_size": "bounds the memory of this library's sampler",
}
SFT_WITHOUT_EFFECT = {**OF_VALIDATION, "hardware.sampler": "samples nothing"}

TABLES: dict[type[BaseModel], list[Mapping[str, Any]]] = {
    RL: [{field: None for field, _, _ in RL_TOLD}, RL_REFUSED, RL_HERE, RL_WITHOUT_EFFECT],
    SFT: [{field: None for field, _, _ in SFT_TOLD}, COMMON_REFUSED, SFT_HERE, SFT_WITHOUT_EFFECT],
}


def fields(model: type[BaseModel], before: str = "") -> Iterator[str]:
    """Names of all fields, those of settings within settings with the way to them."""
    for name, field in model.model_fields.items():
        inner = [*models(field.annotation)]
        yield from (found for each in inner for found in fields(each, f"{before}{name}."))
        if not inner:
            yield before + name


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models(part)


@pytest.mark.parametrize("model", [RL, SFT])
def test_each_field_is_in_one_table(model: type[BaseModel]) -> None:
    names, listed = {*fields(model)}, [name for table in TABLES[model] for name in table]
    of = {name: [entry for entry in listed if f"{name}.".startswith(f"{entry}.")] for name in names}
    assert {name: entries for name, entries in of.items() if len(entries) != 1} == {}
    assert {entry for entry in listed if not any(entry in entries for entries in of.values())} == set()


def test_a_new_field_is_in_none() -> None:
    class Newer(SFT):
        momentum: float = 0.9

    assert {*fields(Newer)} - {*fields(SFT)} == {"momentum"}
    assert not any("momentum" in table for table in TABLES[SFT])


def completed(changes: Changes) -> Changes:
    return {
        **changes,
        "optimizer": OPTIMIZER | changes.get("optimizer", {}),
        "hardware": {"trainer": VERL} | changes.get("hardware", {}),
    }


def rl(changes: Changes) -> RL:
    return RL(**completed({"steps": 8, "sampling": {"max_new_tokens": 4}, **changes}))


def sft(changes: Changes) -> SFT:
    return SFT(**completed(changes))


def told(changes: Changes, model: type[BaseModel], folder: Path) -> dict[str, Any]:
    places = {name: folder / name for name in ("out", "state", "metrics", "result")}
    if model is RL:
        job = RLJob(settings=rl(changes), model="m", problems=[folder], seed=0, **places)
        return rl_settings(job, folder, folder, longest=1, done=0, end=8)
    made = SFTJob(settings=sft(changes), model="m", data=folder, seed=0, **places)
    return sft_settings(made, folder, folder, folder, longest=1, steps=8)


@pytest.mark.parametrize(
    ("model", "field", "before", "after"),
    [(model, *row) for model, rows in ((RL, RL_TOLD), (SFT, SFT_TOLD)) for row in rows],
    ids=lambda value: value if isinstance(value, str) else getattr(value, "__name__", ""),
)
def test_verl_is_told_of_a_change(
    model: type[BaseModel], field: str, before: Changes, after: Changes, tmp_path: Path
) -> None:
    assert told(before, model, tmp_path) != told(after, model, tmp_path)


@pytest.mark.parametrize("field", RL_REFUSED)
def test_rl_is_refused(field: str) -> None:
    with pytest.raises(ValidationError, match=rf"{field.rpartition('.')[2]}|verl runs method|with a trainer, set"):
        rl(RL_REFUSED[field])


@pytest.mark.parametrize("field", COMMON_REFUSED)
def test_sft_is_refused(field: str) -> None:
    with pytest.raises(ValidationError, match=rf"{field.rpartition('.')[2]}|with a trainer, set"):
        sft(COMMON_REFUSED[field])
