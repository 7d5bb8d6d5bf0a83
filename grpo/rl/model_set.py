"""The models of a run: the policy, and the other models that its method uses.

GRPO without a KL penalty holds one model; with it, two (policy, reference). PPO holds three (policy, reference, value).
Reward models are extra. With LoRA the reference is the policy without its adapters and takes no memory. Each model is
sharded over the processes of the job.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from grpo.config.rl import RL
from grpo.distributed.fsdp import Sharded, compute_dtype, local, shard
from grpo.distributed.process_group import Parallel
from grpo.errors import InputError
from grpo.model.lm_head import backbone_of
from grpo.model.loading import decodes_exactly, without_adapters
from grpo.model.logprobs import completion_logprobs
from grpo.model.packed.attention import is_packed
from grpo.model.routers import marked_routers
from grpo.model.sharded.loading import load_sharded
from grpo.model.value_head import Value, own_value
from grpo.rl.method_table import Method
from grpo.rl.per_token_values import PerToken


class Models:
    """The policy of a run and its other models, each sharded over the processes."""

    def __init__(self, model: str, settings: RL, method: Method, parallel: Parallel):
        self.settings, self.method, self.parallel = settings, method, parallel
        self.version = 0  # of the policy's weights: increases with every change
        hardware = settings.hardware
        kept, computed = hardware.to_train(), compute_dtype(hardware)
        kind = method.value_model(settings)
        if kind == "head" and (parallel.world > 1 or computed):
            raise InputError("ppo.value 'head' works in one process and without mixed_precision; take 'model'")
        self.policy = load_sharded(model, kept, parallel, dtype=computed, lora=settings.lora, experts=settings.experts)
        self.routers = marked_routers(self.policy.model)
        self.value: Sharded | None = None
        if kind:
            if kind == "model":
                self.value = load_sharded(model, kept, parallel, dtype=computed, part=own_value)
            else:
                self.value = shard(Value(backbone_of(self.policy.model), False), parallel, dtype=computed)
        self.initial: Sharded | None = None
        if method.keeps_reference(settings):
            of_reference = method.reference_hardware(settings)
            self.initial = load_sharded(model, of_reference, parallel, dtype=computed, trained=False)

    @contextlib.contextmanager
    def reference(self) -> Iterator[Any]:
        """The reference: the policy as it was at the start or at the last refresh. Unsharded in each process, without
        gradients."""
        if self.initial is not None:
            with self.initial.gathered() as model:
                yield model
        else:
            with self.policy.gathered() as model, without_adapters(model):
                yield model

    @contextlib.contextmanager
    def reference_logprobs(self, temperature: float) -> Iterator[PerToken]:
        """Log-probabilities by the reference, without gradients. All processes must enter together and call it equally
        often. Each gathers one block at a time."""
        reference = self.policy if self.initial is None else self.initial
        with without_adapters(reference.model):
            yield lambda prompts, completions: reference(completion_logprobs, prompts, completions, temperature)

    @contextlib.contextmanager
    def sampler(self) -> Iterator[Any]:
        """The model that samples completions. Unsharded in each process, without gradients."""
        with self.policy.gathered() if self.method.online else self.reference() as model:
            yield model

    @property
    def sampler_version(self) -> int:
        return self.version if self.method.online else 0

    @property
    def sampler_is_exact(self) -> bool:
        """Whether the log-probabilities from sampling equal those of a forward pass, up to rounding."""
        return decodes_exactly(self.policy.model)

    @property
    def packed(self) -> bool:
        """Whether the policy runs on packed sequences instead of plain ones."""
        return is_packed(backbone_of(self.policy.model))

    def sampler_weights(self, *, as_in_files: bool = False) -> Iterable[tuple[str, Tensor]]:
        """Weights of `sampler` by their names in the model, or as its files hold them, for an engine that keeps a copy.
        All processes must iterate together, to the end."""
        source = self.policy if self.method.online or self.initial is None else self.initial
        tensors = source.file_tensors if as_in_files else source.full_tensors
        return tensors(adapters=self.method.online)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer: the policy and, in PPO, the value model, each with its own peak learning
        rate."""
        peak = self.settings.optimizer.learning_rate
        groups = [{"params": [p for p in self.policy.parameters() if p.requires_grad], "lr": peak}]
        if self.value is not None:
            rate = self.settings.ppo.value_learning_rate or peak
            groups.append({"params": [*self.value.parameters()], "lr": rate})
        return groups

    @torch.no_grad()
    def refresh_reference(self) -> None:
        """Replaces the reference with the policy (R1), or moves it towards the policy by `reference_mixing`.

        Does nothing if the frozen policy samples the data (rft, dpo): these methods are offline by definition.
        """
        if self.initial is None or self.method.source == "initial":
            return
        for old, new in zip(self.initial.parameters(), self.policy.parameters(), strict=True):
            # A reference that becomes the policy may have a narrower dtype.
            mine, theirs = local(old), local(new)
            mine.lerp_(theirs.to(mine.dtype), self.settings.reference_mixing)

    def modules(self) -> dict[str, nn.Module]:
        """Modules that a checkpoint saves, by name."""
        kept: dict[str, nn.Module] = {"policy": self.policy}
        if self.initial is not None and self.settings.reference_refresh_steps is not None:
            kept["initial"] = self.initial
        if self.value is not None:
            kept["value"] = self.value
        return kept
