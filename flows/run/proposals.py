"""What to set so that a stage fits: fields that were tried, alone or together, or the engine that it needs instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flows.recipe.evaluation import Evaluate
from flows.recipe.process_rewards import ProcessRewards
from flows.recipe.sections import Base, RewardModels
from flows.stages.base_model import base_stage
from flows.stages.distill import student_stage
from grpo.config.common import Hardware
from grpo.config.engines import VLLM
from grpo.config.rl import RL
from grpo.config.supervised import SFT, Supervised
from grpo.errors import InputError
from tasks.estimate.architecture import Architecture
from tasks.estimate.devices import Device
from tasks.estimate.misfits import fits, host_fits
from tasks.estimate.stages import Estimate

A_NODE, NODES = 8, (1, 2, 4, 8, 16, 32)
"""Devices of a machine, and numbers of machines, that a proposal tries."""
SPLITS, SHARES = (1, 2, 4, 8), (0.3, 0.4, 0.5, 0.6, 0.7, 0.85)
"""Devices of a machine that a copy of the model in vLLM is divided among, and shares of their memory for it."""
SEQUENCES = 16
"""Longest sequences that a proposed vLLM has room for at least."""
PROMPT = 2048
"""Tokens of a prompt in the `max_model_len` of a proposed vLLM."""
_FIELDS = {
    "hardware.processes": ("2", "4", "8"),
    "hardware.gradient_checkpointing": ("true",),
    "micro_batch_tokens": ("16384", "8192", "4096", "2048"),
    "hardware.sequence_parallel": ("2", "4", "8"),
    "sampling.batch_size": ("128", "64", "16"),
    "lora": ("{rank=32}",),
    "optimizer.kind": ("adamw_8bit",),
    "hardware.dtype": ("bfloat16",),
    "kl_coef": ("0.0",),
}
"""Fields of a stage's section that save memory, with values to try, from least to most intrusive."""
_CHECKPOINTING = "hardware.gradient_checkpointing=true"
_ON_MORE_DEVICES = (
    (),
    (_CHECKPOINTING,),
    (_CHECKPOINTING, "micro_batch_tokens=16384"),
    (_CHECKPOINTING, "micro_batch_tokens=8192"),
    *((_CHECKPOINTING, "micro_batch_tokens=16384", f"hardware.sequence_parallel={size}") for size in (2, 4, 8)),
    *((_CHECKPOINTING, "micro_batch_tokens=16384", f"hardware.tensor_parallel={size}") for size in (2, 4, 8)),
)
"""Fields that a proposal of more devices sets, too: those that cost time alone first."""


@dataclass(frozen=True)
class Proposal:
    """In words, and as overrides of the recipe; no overrides if none were found."""

    text: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Search:
    """The search for one stage. `with_overrides` returns its estimate under further overrides of the recipe."""

    stage: str
    config: Any  # the stage's section
    estimate: Estimate
    a: Architecture
    device: Device
    with_overrides: Callable[[list[str]], Estimate]
    students: Sequence[str] = ()  # their names, in the recipe's order

    def proposal(self) -> Proposal:
        """Fields that were tried and make the stage fit, or what it needs instead."""
        alone: dict[str, str] = {}  # field -> override with the first value that is enough
        for change in self._changes():
            name = change.partition("=")[0]
            if name not in alone and self._has_room([change]):
                alone[name] = change
        if alone:
            some = [*alone.values()][:4]
            return Proposal(f"one of these is enough: {', '.join(some)}", (some[0],))
        if self.device.kind != "cpu" and (enough := next(self._divided(), None)):
            return Proposal(f"together these fit: {' '.join(enough)}", tuple(enough))
        together = self._strongest()
        if self._fits(together):
            return Proposal(f"together these fit: {' '.join(together)}", tuple(together))
        return Proposal(self._what_else())

    def _what_else(self) -> str:
        larger = f"take {'devices' if host_fits(self.estimate, self.device) else 'machines'} with more memory"
        tried = ([*option, *self._away] for options in self._to_train() for option in options if option)
        if self.device.kind == "cpu" or self._trained is None or not any(map(self._estimate, tried)):
            return larger
        none = f"no number up to {A_NODE * NODES[-1]} fits"
        if isinstance(self.config, RL | SFT):
            return (
                f"{none}; verl with strategy 'megatron' divides layers among machines, too (hardware.trainer, "
                "docs/engines.md)"
            )
        if isinstance(self.config, RewardModels):
            return f"{none}, and no other engine trains reward models; {larger}, or take a judge or rules as rewards"
        return larger

    # What is tried

    @property
    def _section(self) -> str:
        """The recipe's section: later rounds of alignment have none of their own."""
        return re.sub(r"_\d+$", "", self.stage)

    @property
    def _sections(self) -> list[str]:
        for number, student in enumerate(self.students):
            parts = {base_stage(student).name: "base.pretrain", student_stage(student).name: "sft"}
            if self.stage in parts:
                return [f"distill.students.{number}.{parts[self.stage]}"]
        special = {
            "reward_models": ["reward_models.helpful", "reward_models.safe"],
            "process_reward_model": ["process_reward_model.training"],
            "base": ["base.pretrain"],
        }
        return special.get(self._section, [self._section])

    @property
    def _trained(self) -> Supervised | RL | None:
        """The settings of what the stage trains."""
        if isinstance(self.config, RewardModels):
            return self.config.helpful
        if isinstance(self.config, ProcessRewards):
            return self.config.training
        if isinstance(self.config, Base):
            return self.config.pretrain
        return self.config if isinstance(self.config, RL | Supervised) else None

    def _changes(self) -> Iterable[str]:
        """Single fields."""
        for section in self._sections:
            for name, values in _FIELDS.items():
                for value in values:
                    if name != "hardware.processes" or int(value) > self.estimate.devices:
                        yield f"{section}.{name}={value}"
        engine = getattr(self.config, "engine", None)
        if isinstance(engine, VLLM) and engine.kind == "local":
            for share in SHARES:
                if share > engine.gpu_memory_utilization:
                    yield f"{self._section}.engine.gpu_memory_utilization={share}"
            for split in self._splits(engine.tensor_parallel_size + 1):
                yield f"{self._section}.engine.tensor_parallel_size={split}"

    def _strongest(self) -> list[str]:
        """The last value of each field, which saves the most, as far as the stage has it."""
        last = {change.partition("=")[0]: change for change in self._changes()}
        return [change for change in last.values() if self._estimate([change]) is not None]

    def _divided(self) -> Iterator[list[str]]:
        """Overrides that fit: more devices to train on, and a vLLM that is divided or elsewhere."""
        away, last = self._away, []
        for options in self._to_train():
            base = next((each for each in options if self._fits(each + away)), None)
            if base is not None:
                last.append(base + away)
                yield from (base + engine for engine in self._engines(base) if self._has_room(base + engine))
        yield from last

    @property
    def _away(self) -> list[str]:
        """The override that samples elsewhere, if the stage may have it."""
        server = [f'{self._section}.engine={{kind="server"}}']
        return server if self._samples_here and self._estimate(server) is not None else []

    def _to_train(self) -> Iterator[list[list[str]]]:
        """For each number of machines, from few to many: overrides of what is trained."""
        yield [[]]
        if self._trained is None:
            if isinstance(self.config, Evaluate) and self.config.alignment_scores:
                yield [[f"{self._section}.alignment_scores=false"]]
            return
        for nodes in NODES:
            if nodes * A_NODE >= self._processes(self._trained.hardware):
                where = (f"hardware.processes={A_NODE}", f"hardware.nodes={nodes}")
                yield [
                    [f"{section}.{field}" for section in self._sections for field in (*where, *others)]
                    for others in _ON_MORE_DEVICES
                    if self._smaller(others)
                ]

    def _smaller(self, others: Iterable[str]) -> bool:
        """Whether each number of tokens is smaller than what is set."""
        assert self._trained is not None
        sizes = [int(value) for name, _, value in (o.partition("=") for o in others) if name == "micro_batch_tokens"]
        return all(size <= self._trained.micro_batch_tokens for size in sizes)

    def _engines(self, base: list[str]) -> Iterator[list[str]]:
        """Overrides of the engine, from none to the largest vLLM in the process."""
        yield []
        if not self._samples_here:
            return
        with_base = self._estimate(base)
        trainer = self.config.helpful if isinstance(self.config, RewardModels) else self.config
        processes = with_base.devices if with_base and self._trained is not None else self._processes(trainer.hardware)
        for split in self._splits(1):
            alone: list[str] = []
            if not isinstance(self.config, RL) and split > 1 and processes > 1:
                if self._trained is not None:
                    continue  # its processes sample as well, each for itself
                alone = [f"{self._section}.hardware.{name}=1" for name in ("processes", "nodes")]
            for share in SHARES:
                yield alone + self._engine(split, share)

    def _engine(self, split: int, share: float) -> list[str]:
        path, engine = f"{self._section}.engine", self.config.engine
        if engine is None:
            longest = _longest(self.config) + PROMPT
            fields = f"tensor_parallel_size={split},gpu_memory_utilization={share},max_model_len={longest}"
            return [f'{path}={{kind="local",{fields}}}']
        wanted: dict[str, Any] = {"tensor_parallel_size": split, "gpu_memory_utilization": share}
        return [f"{path}.{name}={value}" for name, value in wanted.items() if getattr(engine, name) != value]

    def _splits(self, least: int) -> list[int]:
        """Numbers of devices that vLLM can divide the model among."""
        return [split for split in SPLITS if split >= least and self.a.heads % split == 0]

    @property
    def _samples_here(self) -> bool:
        """Whether it has an engine to set, and none elsewhere."""
        if "engine" not in type(self.config).model_fields:
            return False
        engine = self.config.engine
        return engine is None or (isinstance(engine, VLLM) and engine.kind == "local")

    @staticmethod
    def _processes(hardware: Hardware) -> int:
        return hardware.processes * hardware.nodes

    # Whether it is enough

    def _has_room(self, overrides: list[str]) -> bool:
        """Whether it fits, and vLLM has room for more than a single sequence."""
        estimate = self._estimate(overrides)
        if estimate is None or not fits(estimate, self.device):
            return False
        engine = estimate.memory.engine if estimate.memory else None
        if engine is None or not any(".engine" in override for override in overrides):
            return True
        return engine.room >= (SEQUENCES - 1) * engine.cache

    def _fits(self, overrides: list[str]) -> bool:
        estimate = self._estimate(overrides)
        return estimate is not None and fits(estimate, self.device)

    def _estimate(self, overrides: list[str]) -> Estimate | None:
        """None if the stage has no such field, if the field conflicts with others, or if the model cannot be divided
        like this."""
        for override in overrides:
            name, _, value = override.partition("=")
            if name.endswith(("_parallel", "tensor_parallel_size")) and self.a.heads % int(value):
                return None
            if name.endswith("tensor_parallel") and self.a.key_heads % int(value):
                return None
        try:
            return self.with_overrides(overrides)
        except InputError:
            return None


def _longest(config: Any) -> int:
    """Most tokens of a completion that a stage may sample, in training, for validation or for a test set."""
    validation, sets = getattr(config, "validation", None), getattr(config, "sets", None)
    samplings = [config.sampling, getattr(validation, "sampling", None)]
    samplings += [getattr(each, "sampling", None) for each in (sets.values() if isinstance(sets, dict) else sets or ())]
    samplings += getattr(config, "sampling_by_source", {}).values()
    lengths = [sampling.max_new_tokens for sampling in samplings if sampling is not None]
    return max([*lengths, *getattr(config, "max_new_tokens_from", {}).values()], default=0)
