"""What samples rollouts: transformers in the trainer's process, or vLLM, behind one interface.

| engine    | weights                                | log-probabilities |
|-----------|----------------------------------------|-------------------|
| Own       | the trainer's own                      | exact             |
| Copied    | a copy beside them, replaced each time | exact             |
| vLLM      | a copy in vLLM's form, local or served | of another kernel |

Exact log-probabilities are the trainer's up to rounding, so the update takes them for those of the policy that sampled.
Of others it measures by how much they differ, each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo.config.common import Sampling
from grpo.config.rl import RL
from grpo.data.completions import Completion
from grpo.errors import TrainingStopped
from grpo.generation.sampler import sample_groups
from grpo.generation.vllm.local import LocalVLLM
from grpo.generation.vllm.server import ServerVLLM
from grpo.generation.vllm.weight_transfer import UNKNOWN
from grpo.model.loading import load_policy
from grpo.rl.model_set import Models

Weights = Iterable[tuple[str, Tensor]]


class Engine(Protocol):
    exact: bool

    def sample(
        self, prompts: Sequence[Sequence[int]], per_prompt: int, settings: Sampling, seeds: Sequence[int]
    ) -> Iterator[tuple[int, list[Completion]]]:
        """Each prompt's index and its completions as soon as the last of them ended; `seeds`: one for each prompt."""

    def update(self, weights: Weights, version: int) -> None:
        """From when this returns, completions come from `weights`: full tensors by their names in transformers' files.
        All processes call it together. Raises TrainingStopped when they did not arrive."""

    def version(self) -> int:
        """Of the weights that it samples with; UNKNOWN (-1) before the first update."""

    def sleep(self) -> None:
        """Give memory back until `wake`."""

    def wake(self) -> None: ...

    def close(self) -> None: ...


class Own:
    """The models of the trainer: nothing is copied, so nothing can be missed."""

    exact = True

    def __init__(self, models: Models, eos_id: int):
        self._models, self._eos_id = models, eos_id

    def sample(
        self, prompts: Sequence[Sequence[int]], per_prompt: int, settings: Sampling, seeds: Sequence[int]
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


class Copied:
    """A copy of the policy, whole in each process, that goes on sampling while the policy learns."""

    exact = True

    def __init__(self, model: str, settings: RL, eos_id: int):
        self._model = load_policy(model, settings.hardware).requires_grad_(False)
        self._eos_id, self._version = eos_id, UNKNOWN

    def sample(
        self, prompts: Sequence[Sequence[int]], per_prompt: int, settings: Sampling, seeds: Sequence[int]
    ) -> Iterator[tuple[int, list[Completion]]]:
        yield from sample_groups(self._model, prompts, per_prompt, settings, eos_id=self._eos_id, seeds=seeds)

    @torch.no_grad()
    def update(self, weights: Weights, version: int) -> None:
        self._version = UNKNOWN
        missing = dict(self._model.named_parameters())
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
        pass


class Fed:
    """An engine that has the weights of the moment whenever it samples, or the run stops."""

    def __init__(self, engine: Engine, models: Models):
        self.engine, self._models = engine, models
        self._sent = UNKNOWN  # what an engine had from another run is none of ours

    def feed(self) -> int:
        """Wake the engine with the weights of now and return their version. All processes call it together."""
        version = self._models.sampler_version
        self.engine.wake()
        if self._sent != version:
            self.engine.update(self._models.sampler_weights(), version)
            self._sent = version
        if (held := self.engine.version()) != version:
            raise TrainingStopped(
                f"the sampler holds version {held} of the weights and the policy is at version {version}: an update "
                "was missed; start the run again, it continues from its last checkpoint"
            )
        return version


def make_engine(model: str, settings: RL, models: Models, eos_id: int) -> Engine:
    """The engine that the settings choose."""
    chosen = settings.engine
    if chosen is None:
        return Copied(model, settings, eos_id) if settings.rollouts_ahead else Own(models, eos_id)
    makers: dict[str, Any] = {
        "local": lambda: LocalVLLM(model, chosen, eos_id=eos_id, dtype=settings.hardware.dtype),
        "server": lambda: ServerVLLM(model, chosen, eos_id=eos_id),
    }
    made: Engine = makers[chosen.kind]()
    return made
