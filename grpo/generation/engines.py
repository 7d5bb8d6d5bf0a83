"""Engines that sample rollouts, behind one interface: transformers in the trainer's process, or vLLM.

| engine             | weights                                | log-probabilities |
|--------------------|----------------------------------------|-------------------|
| SharedWeights      | the trainer's own                      | exact             |
| ContinuousBatching | the trainer's own                      | other kernels     |
| CopiedWeights      | a copy beside them, replaced each time | exact             |
| vLLM               | a copy in vLLM's form, local or served | other kernels     |

Exact log-probabilities equal the trainer's up to rounding, so the update uses them as those of the old policy. If they
are not exact, each step measures the difference. The same holds if a model runs plain (`grpo.model.probe`), because for
some models `generate` does not compute the same as the forward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo.config.common import Sampling
from grpo.config.engines import VLLM
from grpo.config.rl import RL
from grpo.data.completions import Completion
from grpo.distributed.fsdp import stored_tensors
from grpo.errors import InputError, TrainingStopped
from grpo.generation.continuous_batching import sample_continuously
from grpo.generation.engine_choice import Needs, choose_sampler
from grpo.generation.sampler import sample_groups
from grpo.generation.vllm.client import ServerVLLM
from grpo.generation.vllm.local import LocalVLLM
from grpo.generation.vllm.request import check_ahead
from grpo.generation.vllm.weight_transfer import UNKNOWN
from grpo.model.loading import decodes_exactly, load_policy
from grpo.model.packed.products import compute_beside

logger = logging.getLogger(__name__)

Weights = Iterable[tuple[str, Tensor]]


class PolicySource(Protocol):
    """The trainer's models, as an engine reads them."""

    @property
    def sampler_version(self) -> int: ...

    @property
    def sampler_is_exact(self) -> bool: ...

    @property
    def packed(self) -> bool: ...

    def sampler(self) -> AbstractContextManager[Any]: ...

    def sampler_weights(self, *, as_in_files: bool = False) -> Weights: ...


class Engine(Protocol):
    """Samples rollouts. `exact`: whether its log-probabilities are the trainer's up to rounding."""

    exact: bool
    name: str  # own, continuous or vllm
    reads_files: bool  # whether `update` takes tensors as a model's files hold them

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        per_prompt: int,
        settings: Sampling,
        seeds: Sequence[int],
        *,
        logprobs: bool = True,
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Yields each prompt's index and completions as soon as its last one has ended. `seeds`: one per prompt.

        With `logprobs` false, completions need none. An engine whose log-probabilities are wrong at a top-p below 1
        raises InputError only if they are needed.
        """

    def update(self, weights: Weights, version: int) -> None:
        """Replaces the weights: once it returns, completions are sampled from `weights`, full tensors by their names in
        the model, or in its files if it `reads_files`. All processes must call it together. Raises TrainingStopped if
        the weights did not arrive."""

    def version(self) -> int:
        """Version of the weights that it samples with; UNKNOWN (-1) before the first update."""

    def sleep(self) -> None:
        """Releases memory until `wake`. All processes must call it together, and `wake`, too: they may share what
        sleeps."""

    def wake(self) -> None: ...

    def close(self) -> None: ...


class SharedWeights:
    """Samples with the trainer's own weights, which are never copied and so never out of date."""

    name, reads_files = "own", False

    def __init__(self, models: PolicySource, eos_id: int):
        self._models, self._eos_id = models, eos_id
        self.exact = models.sampler_is_exact

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        per_prompt: int,
        settings: Sampling,
        seeds: Sequence[int],
        *,
        logprobs: bool = True,
    ) -> Iterator[tuple[int, list[Completion]]]:
        with self._models.sampler() as model:
            yield from sample_groups(model, prompts, per_prompt, settings, eos_id=self._eos_id, seeds=seeds)

    def update(self, weights: Weights, version: int) -> None:
        pass

    def version(self) -> int:
        return self._models.sampler_version

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class ContinuousBatching(SharedWeights):
    """Samples with the trainer's own weights by transformers' continuous batching; falls back to SharedWeights once
    transformers rejects the model."""

    name = "continuous"

    def __init__(self, models: PolicySource, eos_id: int):
        super().__init__(models, eos_id)
        self.exact = False  # other kernels round differently

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        per_prompt: int,
        settings: Sampling,
        seeds: Sequence[int],
        *,
        logprobs: bool = True,
    ) -> Iterator[tuple[int, list[Completion]]]:
        asked: dict[str, Any] = {"eos_id": self._eos_id, "seeds": seeds}
        # Entered once, even if this process falls back: all processes together gather the weights of a sharded model.
        with self._models.sampler() as model:
            begun = False
            if self.name == "continuous":
                try:
                    for group in sample_continuously(model, prompts, per_prompt, settings, **asked, logprobs=logprobs):
                        begun = True
                        yield group
                    return
                except (ValueError, NotImplementedError, AttributeError) as error:
                    if begun or isinstance(error, InputError):
                        raise
                    logger.warning("transformers' continuous batching refuses this model (%s): samples with own", error)
                    self.name = "own"
            yield from sample_groups(model, prompts, per_prompt, settings, **asked)


class CopiedWeights:
    """Samples with a copy of the policy, complete in each process, while the policy trains."""

    name, reads_files = "own", False

    def __init__(self, model: str, settings: RL, eos_id: int):
        self._model = load_policy(model, settings.hardware).requires_grad_(False)
        self._eos_id, self._version = eos_id, UNKNOWN
        self.exact = decodes_exactly(self._model)
        compute_beside(1)

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        per_prompt: int,
        settings: Sampling,
        seeds: Sequence[int],
        *,
        logprobs: bool = True,
    ) -> Iterator[tuple[int, list[Completion]]]:
        yield from sample_groups(self._model, prompts, per_prompt, settings, eos_id=self._eos_id, seeds=seeds)

    @torch.no_grad()
    def update(self, weights: Weights, version: int) -> None:
        self._version = UNKNOWN
        missing = dict(stored_tensors(self._model))
        for name, tensor in weights:
            missing.pop(name).copy_(tensor)
        if missing:
            raise TrainingStopped(f"version {version} of the weights lacks {', '.join(missing)}")
        self._version = version

    def version(self) -> int:
        return self._version

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def close(self) -> None:
        compute_beside(-1)


class SyncedEngine:
    """An engine that always samples with the current weights; if it cannot, the run stops."""

    def __init__(self, engine: Engine, models: PolicySource):
        self.engine, self._models = engine, models
        self._sent = UNKNOWN  # an engine may still hold weights of another run

    def sync(self) -> int:
        """Wakes the engine, sends it the current weights and returns their version. All processes must call it
        together."""
        version = self._models.sampler_version
        self.engine.wake()
        if self._sent != version:
            self.engine.update(self._models.sampler_weights(as_in_files=self.engine.reads_files), version)
            self._sent = version
        if (held := self.engine.version()) != version:
            raise TrainingStopped(
                f"the sampler holds version {held} of the weights and the policy is at version {version}: an update "
                "was missed; start the run again, it continues from its last checkpoint"
            )
        return version


def make_engine(model: str, settings: RL, models: PolicySource, eos_id: int) -> Engine:
    """The engine that the settings choose."""
    vllm = settings.engine
    if vllm is None:
        needs = Needs(settings.sampling, _samplings(settings), bool(settings.rollouts_ahead))
        name = choose_sampler(settings.hardware, needs).name
        if name == "own" and settings.rollouts_ahead:
            return CopiedWeights(model, settings, eos_id)
        if settings.rollouts_ahead:
            raise InputError(f"rollouts_ahead needs hardware.sampler 'own' or an engine of kind 'server', not {name!r}")
        if name != "vllm":
            return (ContinuousBatching if name == "continuous" else SharedWeights)(models, eos_id)
        vllm = VLLM(kind="local")
    engine: LocalVLLM | ServerVLLM
    if vllm.kind == "local":
        engine = LocalVLLM(model, vllm, eos_id=eos_id, dtype=settings.hardware.dtype)
    else:
        engine = ServerVLLM(model, vllm, eos_id=eos_id)
    check_ahead(_samplings(settings), engine.longest)
    return engine


def _samplings(settings: RL) -> list[Sampling]:
    """Those of all steps, which may differ in length, and of validations."""
    starts = [0, *(start for start in settings.max_new_tokens_from if start < settings.steps)]
    lengths = sorted({settings.max_new_tokens(start) for start in starts})
    of_steps = [settings.sampling.model_copy(update={"max_new_tokens": length}) for length in lengths]
    validation = settings.validation.sampling if settings.validate_every else None
    return [*of_steps, *([validation] if validation else [])]
