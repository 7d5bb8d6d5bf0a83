"""What verl is told, and what is refused before it starts. verl itself is not needed."""

from __future__ import annotations

import sys

import pytest
from pydantic import ValidationError

from grpo.algorithms.advantages import ADVANTAGES
from grpo.algorithms.objectives import OBJECTIVES
from grpo.config.common import Optimizer
from grpo.config.rl import RL
from grpo.config.supervised import SFT, RewardModel
from grpo.errors import InputError
from grpo.trainers.verl.checkpoints import Checkpoints
from grpo.trainers.verl.overrides import overrides
from grpo.trainers.verl.processes import check_environment
from grpo.trainers.verl.settings import engine_settings, model_settings, optimizer_settings, saved_dtype, under

VERL = {"kind": "verl", "python": "/opt/verl/bin/python"}
OPTIMIZER = {"learning_rate": 1e-3}


def sft(**changed):
    hardware = changed.pop("hardware", {})
    return SFT(**{"optimizer": OPTIMIZER, "hardware": {"trainer": VERL, **hardware}, **changed})


def test_values_in_the_syntax_of_hydra():
    said = overrides({"a.b": "/x y/it's=1", "+c": [0.9, True, None], "d": {"e": "bf16", "f": 2}})
    assert said == [r"a.b='/x y/it\'s=1'", "+c=[0.9,True,null]", "d={e:'bf16',f:2}"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"lora": {"rank": 4}}, "lora is not translated for verl"),
        ({"validate_every": 5}, "validate_every is not translated"),
        ({"optimizer": {**OPTIMIZER, "kind": "adamw_8bit"}}, "optimizer.kind is not translated"),
        ({"batch_size": 9, "hardware": {"processes": 2, "nodes": 2}}, "no multiple of 4"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(changed, said):
    with pytest.raises(ValidationError, match=said):
        sft(**changed)


@pytest.mark.parametrize(
    ("option", "said"),
    [("engine.param_offload", "is no setting; write section.field=value"), ("trainer.api_key=x7", "is a secret")],
)
def test_options_are_settings_and_hold_no_secret(option, said):
    with pytest.raises(ValidationError, match=said) as refused:
        sft(hardware={"trainer": {**VERL, "options": [option]}})
    assert "x7" not in str(refused.value.errors()[0]["msg"])


def test_verl_divides_layers_by_megatron_alone():
    with pytest.raises(ValidationError, match="with a trainer, set trainer.megatron.tensor instead"):
        sft(hardware={"processes": 2, "tensor_parallel": 2})


def test_sequences_of_a_batch_are_divided_among_groups_of_processes():
    assert sft(batch_size=9, hardware={"processes": 2, "sequence_parallel": 2})


def rl(**changed):
    own = {"steps": 8, "sampling": {"max_new_tokens": 4}, "optimizer": OPTIMIZER}
    return RL(**{**own, "hardware": {"trainer": VERL, **changed.pop("hardware", {})}, **changed})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"method": "ppo"}, "verl runs method 'grpo', not 'ppo'"),
        ({"objective": "grpo_sequence"}, "its KL penalty is of whole sequences"),
        ({"objective": "bnpo"}, "its mean is over a micro-batch"),
        ({"curriculum": {}}, "curriculum is not translated for verl"),
        ({"dynamic_sampling_rounds": 2}, "dynamic_sampling_rounds is not translated"),
        ({"rollouts_ahead": 1}, "rollouts_ahead is not translated"),
        ({"mask_truncated": True}, "mask_truncated is not translated"),
        ({"supervision": "process"}, "supervision is not translated"),
        ({"lora": {}}, "lora is not translated"),
        ({"reference_refresh_steps": 4, "reference_mixing": 0.5}, "reference_mixing is not translated"),
        ({"hardware": {"sampler": "own"}}, "hardware.sampler is not translated"),
        ({"minibatches": 3}, r"steps \(8\) is no multiple of minibatches \* inner_epochs \(3\)"),
        ({"minibatches": 2, "reference_refresh_steps": 3}, r"reference_refresh_steps \(3\) is no multiple"),
        ({"minibatches": 2, "optimizer": {**OPTIMIZER, "warmup_steps": 1}}, "leave out optimizer.warmup_steps"),
        (
            {"reference_refresh_steps": 4, "optimizer": {**OPTIMIZER, "final_learning_rate_share": 0.5}},
            "leave out optimizer.final_learning_rate_share",
        ),
        (
            {"prompts_per_step": 1, "group_size": 3, "hardware": {"processes": 2}},
            r"group_size \(3\) is no multiple of 2",
        ),
    ],
)
def test_what_verl_cannot_do_in_rl_is_refused_by_name(changed, said):
    with pytest.raises(ValidationError, match=said):
        rl(**changed)


def test_every_other_objective_and_advantage_is_taken():
    for objective in OBJECTIVES.keys() - {"grpo_sequence", "bnpo"}:
        assert rl(objective=objective)
    for advantage in ADVANTAGES:
        assert rl(advantage=advantage)


def test_other_jobs_are_refused():
    with pytest.raises(ValidationError, match="verl runs SFT and RL only"):
        RewardModel(optimizer=OPTIMIZER, hardware={"trainer": VERL})


def test_precision_and_packing(tmp_path):
    def told(**hardware):
        made = sft(hardware=hardware).hardware
        engine = engine_settings(made.trainer, made, 2**40 + 7, made.to_train().dtype)
        return under("model", model_settings("/models/m", made)) | under("engine", engine)

    mixed = told(dtype="bfloat16", mixed_precision=True, sequence_parallel=1)
    assert mixed["engine.model_dtype"] == "fp32"
    assert mixed["+engine.mixed_precision"]["param_dtype"] == "bf16"
    assert mixed["model.use_remove_padding"] is True and "+model.override_config.attn_implementation" not in mixed
    plain = told(attention="plain")
    assert plain["model.use_remove_padding"] is False
    assert plain["+model.override_config.attn_implementation"] == "sdpa"
    assert mixed["engine.seed"] == 2**40 % 2**32 + 7


MEGATRON = {**VERL, "strategy": "megatron", "megatron": {"tensor": 2, "pipeline": 4, "expert": 8}}
MIXED = {"dtype": "bfloat16", "mixed_precision": True, "processes": 8, "nodes": 2, "trainer": MEGATRON}


@pytest.mark.parametrize(
    ("hardware", "said"),
    [
        ({"trainer": {**VERL, "strategy": "megatron"}}, "go together; set both or none"),
        ({"trainer": {**MEGATRON, "strategy": "fsdp2"}}, "go together; set both or none"),
        ({**MIXED, "nodes": 3, "processes": 4}, r"context \(8\) must divide processes \* nodes \(12\)"),
        ({**MIXED, "sequence_parallel": 2}, "set trainer.megatron.context instead"),
        ({**MIXED, "mixed_precision": False}, "set dtype and mixed_precision"),
    ],
)
def test_a_split_that_megatron_cannot_have_is_refused(hardware, said):
    with pytest.raises(ValidationError, match=said):
        sft(hardware=hardware)


def test_sequences_are_divided_among_megatrons_copies():
    assert sft(batch_size=6, hardware=MIXED).hardware.copies == 2  # 16 processes, 8 of them for one copy
    with pytest.raises(ValidationError, match=r"batch_size \(5\) is no multiple of 2"):
        sft(batch_size=5, hardware=MIXED)


def test_megatron_is_told_how_to_divide_the_model():
    made = sft(hardware={**MIXED, "gradient_checkpointing": True}).hardware
    told = engine_settings(made.trainer, made, 7, "float32")
    assert told["tensor_model_parallel_size"] == 2 and told["pipeline_model_parallel_size"] == 4
    assert told["expert_model_parallel_size"] == 8 and told["expert_tensor_parallel_size"] is None
    assert told["override_transformer_config.recompute_granularity"] == "full"
    assert saved_dtype(made) == "bfloat16"
    optimizer = Optimizer(learning_rate=1e-5, final_learning_rate_share=0.1)
    assert optimizer_settings(made.trainer, optimizer)["min_lr"] == pytest.approx(1e-6)


def test_the_schedule():
    settings = sft(optimizer={**OPTIMIZER, "warmup_steps": 5, "final_learning_rate_share": 0.1, "adam_beta2": 0.98})
    told = optimizer_settings(settings.hardware.trainer, settings.optimizer)
    assert told["betas"] == [0.9, 0.98]
    assert (told["min_lr_ratio"], told["lr_warmup_steps"]) == (0.1, 5)
    assert told["zero_indexed_step"] is False


def test_a_missing_interpreter_is_one_line(tmp_path):
    with pytest.raises(InputError, match=r"hardware.trainer.python: .*/no cannot be run"):
        check_environment(sft(hardware={"trainer": {**VERL, "python": tmp_path / "no"}}).hardware.trainer)


def test_an_environment_without_verl_says_how_to_install_it():
    with pytest.raises(InputError, match=r"has no verl; install it there: pip install verl==0\.9\.1"):
        check_environment(sft(hardware={"trainer": {**VERL, "python": sys.executable}}).hardware.trainer)


def test_the_newest_complete_checkpoint_counts(tmp_path):
    two, four = Checkpoints(tmp_path, 2, "actor"), Checkpoints(tmp_path, 4, "actor")
    assert two.newest() == 0
    (tmp_path / "global_step_4/actor").mkdir(parents=True)
    (tmp_path / "global_step_4/actor/model_world_size_2_rank_0.pt").touch()
    assert two.newest() == 0  # not all processes are done with it
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    assert two.newest() == 4
    with pytest.raises(InputError, match="2 processes wrote"):
        four.newest()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("")  # damaged
    assert four.newest() == 0 and not (tmp_path / "latest_checkpointed_iteration.txt").exists()
