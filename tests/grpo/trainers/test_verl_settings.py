"""What verl is told, and what is refused before it starts. verl itself is not needed."""

from __future__ import annotations

import json
import math
import shutil
import sys

import huggingface_hub
import pytest
from pydantic import ValidationError

from grpo.algorithms.advantages import ADVANTAGES
from grpo.algorithms.objectives import OBJECTIVES
from grpo.config.common import Optimizer
from grpo.config.jobs import SFTJob
from grpo.config.rl import RL
from grpo.config.supervised import SFT, RewardModel
from grpo.errors import InputError
from grpo.health.checks import Health, HealthSettings
from grpo.trainers.verl.checkpoints import Checkpoints
from grpo.trainers.verl.model_input import folder_for_verl
from grpo.trainers.verl.overrides import overrides
from grpo.trainers.verl.processes import check_environment
from grpo.trainers.verl.records import Records
from grpo.trainers.verl.settings import (
    engine_settings,
    model_settings,
    optimizer_settings,
    saved_dtype,
    tokens_per_device,
    under,
)
from grpo.trainers.verl.sft import train_sft

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
        return under("model", model_settings(tmp_path, made)) | under("engine", engine)

    mixed = told(dtype="bfloat16", mixed_precision=True, sequence_parallel=1)
    assert mixed["engine.model_dtype"] == "fp32"
    assert mixed["+engine.mixed_precision"]["param_dtype"] == "bf16"
    assert mixed["model.use_remove_padding"] is True and "+model.override_config.attn_implementation" not in mixed
    for padded in (
        told(dtype="bfloat16", attention="plain"),
        told(dtype="float32"),
        told(dtype="bfloat16", device="cpu"),
    ):
        assert padded["model.use_remove_padding"] is False
        assert padded["+model.override_config.attn_implementation"] == "sdpa"
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
    assert told["++override_transformer_config.attention_dropout"] == 0.0
    optimizer = Optimizer(learning_rate=1e-5, final_learning_rate_share=0.1, warmup_steps=5, adam_beta2=0.98)
    rates = optimizer_settings(made.trainer, optimizer)
    assert rates["min_lr"] == pytest.approx(1e-6)
    assert rates["lr_warmup_init"] == pytest.approx(2e-6)  # the first of five steps up to the peak
    assert rates["use_checkpoint_opt_param_scheduler"] is True
    # verl hands no betas on to Megatron, but what overrides Megatron's own
    assert rates["+override_optimizer_config.adam_beta1"] == 0.9 and "betas" not in rates
    assert rates["+override_optimizer_config.adam_beta2"] == 0.98


@pytest.mark.parametrize(
    ("hardware", "sharing"),
    [
        ({"processes": 8, "sequence_parallel": 8}, 8),
        ({"processes": 8}, 1),
        ({**MIXED, "trainer": {**MEGATRON, "megatron": {"tensor": 2, "context": 4}}}, 4),
    ],
)
def test_verl_multiplies_the_tokens_of_a_device_by_the_processes_that_share_a_sequence(hardware, sharing):
    made = sft(hardware=hardware).hardware
    for micro_batch_tokens, longest in ((4096, 34001), (34001, 4096)):
        told = tokens_per_device(made, micro_batch_tokens, longest)
        assert 0 <= told * sharing - 34001 < sharing


def test_models_with_dropout_are_trained_without_it_as_here(tmp_path):
    config = {"attention_dropout": 0.1, "router_jitter_noise": 0.01, "resid_pdrop": 0.0, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = model_settings(tmp_path, sft().hardware)
    assert told["+override_config.attention_dropout"] == told["+override_config.router_jitter_noise"] == 0.0
    assert not [name for name in told if "resid" in name or "hidden" in name]


def test_a_tokenizer_of_its_own_code_is_refused_since_verl_would_run_it(tmp_path):
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoModel": "own.Model"}, "model_type": "own"}')
    (tmp_path / "model.safetensors").touch()
    trusting = sft(hardware={"remote_code": True}).hardware
    assert folder_for_verl(str(tmp_path), trusting) == tmp_path
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Tokenizer", null]}}')
    with pytest.raises(InputError, match="its tokenizer is code of its own"):
        folder_for_verl(str(tmp_path), trusting)


def test_a_model_of_the_hub_comes_with_its_configuration_and_its_code_only_if_trusted(tmp_path, monkeypatch):
    for name in ("config.json", "model.safetensors", "tokenizer.json", "pytorch_model.bin", "own.py"):
        (tmp_path / "hub" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "hub" / name).write_text("{}")

    def download(model: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        (kept := tmp_path / f"kept{len([*tmp_path.iterdir()])}").mkdir()
        for path in (tmp_path / "hub").iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                shutil.copy(path, kept)
        return str(kept)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    folder = folder_for_verl("someone/a-model", sft().hardware)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    trusted = folder_for_verl("someone/a-model", sft(hardware={"remote_code": True}).hardware)
    assert (trusted / "own.py").exists() and not (trusted / "pytorch_model.bin").exists()


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


def checkpoints(folder, **hardware) -> Checkpoints:
    return Checkpoints(folder, sft(batch_size=16, hardware=hardware).hardware, "actor")


def test_the_machine_whose_process_logs_knows_where_to(tmp_path, monkeypatch):
    """With Megatron's pipeline, that process is on the last machine."""
    interpreter, said = tmp_path / "python", tmp_path / "said"
    interpreter.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && echo 0.9.1 3 11 || echo "$RANK $VERL_FILE_LOGGER_PATH" >{said}\n'
    )
    interpreter.chmod(0o755)
    for name, value in {"ENDPOINT": "127.0.0.1:9", "ID": "first"}.items():
        monkeypatch.setenv(f"PET_RDZV_{name}", value)
    monkeypatch.setenv("PET_NODE_RANK", "1")
    places = {name: tmp_path / name for name in ("out", "state", "metrics", "result")}
    settings = sft(hardware={"nodes": 2, "trainer": {**VERL, "python": interpreter}})
    (folder := tmp_path / "state/verl").mkdir(parents=True)
    call = {"command": [str(interpreter), "-m", "verl"], "variables": {"VERL_FILE_LOGGER_PATH": "/shared/log.jsonl"}}
    (folder / "command-first.json").write_text(json.dumps(call))  # as the first machine writes it
    train_sft(SFTJob(settings=settings, model="m", data=tmp_path, seed=0, **places))
    assert said.read_text() == "1 /shared/log.jsonl\n"


def test_the_newest_complete_checkpoint_counts(tmp_path):
    two, tracker = checkpoints(tmp_path, processes=2), tmp_path / "latest_checkpointed_iteration.txt"
    assert two.newest() == 0
    two.begin()
    for step in (2, 4):
        (tmp_path / f"global_step_{step}/actor").mkdir(parents=True)
    assert two.newest() == 0  # not all processes are done with it
    tracker.write_text("4")
    assert two.newest() == 4
    tracker.write_text("")  # a kill between opening it and writing: the checkpoint before it is complete
    assert two.newest() == 4 and tracker.read_text() == "4"
    tracker.write_text("3")  # of a folder that is gone; the newer one may be half written
    assert two.newest() == 2 and tracker.read_text() == "2"
    two.begin()
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_2"]
    (tmp_path / "global_step_2/actor").rmdir()
    (tmp_path / "global_step_2").rmdir()
    assert two.newest() == 0 and not tracker.exists()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ({"processes": 2}, {"processes": 4}, r"processes \* hardware.nodes is 4, but .* step 4 was written with 2"),
        (
            MIXED,
            {**MIXED, "trainer": {**MEGATRON, "megatron": {"tensor": 4, "pipeline": 2}}},
            "tensor is 4, but .* with 2",
        ),
        (MIXED, {**MIXED, "nodes": 1}, None),  # another number of copies
    ],
)
def test_a_checkpoint_of_a_model_that_was_divided_otherwise_is_refused(before, after, said, tmp_path):
    checkpoints(tmp_path, **before).begin()
    (tmp_path / "global_step_4/actor").mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    if said is None:
        assert checkpoints(tmp_path, **after).newest() == 4
    else:
        with pytest.raises(InputError, match=said):
            checkpoints(tmp_path, **after).newest()


def test_a_published_model_has_the_code_that_it_needs(tmp_path):
    written = tmp_path / "checkpoints/global_step_4/actor/huggingface"
    for folder in (written, tmp_path / "base", tmp_path / "out"):
        folder.mkdir(parents=True)
    (written / "model.safetensors").write_text("weights")
    (written / "config.json").write_text('{"auto_map": {"AutoModel": "own.Model"}, "dtype": "bfloat16"}')
    (tmp_path / "base/own.py").write_text("class Model: ...")
    checkpoints(tmp_path / "checkpoints").publish(4, tmp_path / "out", "float32", tmp_path / "base")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors", "config.json", "own.py"}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float32"


def test_what_is_not_finite_stops_a_run_of_verl_as_any_other(tmp_path):
    log = tmp_path / "log.jsonl"
    records = Records(log, {"actor/grad_norm": "grad_norm", "actor/loss": "loss"}, first_rate=1e-3)
    data = {"actor/grad_norm": None, "actor/loss": 0.5, "perf/mfu": None}  # verl writes NaN as null
    log.write_text(json.dumps({"step": 1, "data": data}) + "\n")
    ((step, values),) = records.new()
    assert step == 1 and math.isnan(values["grad_norm"]) and "verl/perf/mfu" not in values
    (event,) = Health(HealthSettings()).check(step, values)
    assert event.name == "not_finite" and "grad_norm is nan" in event.message
