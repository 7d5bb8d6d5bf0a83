"""Routers of mixtures of experts, recognized by what they return: frozen, balanced, or replaying earlier choices.

There is no list of architectures that says which modules are routers. A router returns, for N tokens, logits of E
experts [N, E], the weights of the K chosen ones [N, K], and their indices [N, K]; so do those of all models that
transformers wrote or converted for its grouped experts.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.overrides import TorchFunctionMode

from grpo.config.experts import Experts
from grpo.errors import InputError
from grpo.model.lm_head import backbone_of
from grpo.model.loading import decodes_exactly
from grpo.model.logprobs import completion_logprobs
from grpo.model.packed.packing import pack
from grpo.model.packed.transfer import to_device
from grpo.model.probe import probe_sequences


@dataclass
class Routing:
    """What one router returned for N tokens."""

    logits: Tensor  # [N, E]
    experts: Tensor  # [N, K]


def prepare_routers(policy: Any, model: str, experts: Experts) -> list[nn.Module]:
    """Returns the routers of a policy, frozen or prepared for replay as `experts` says. Raises InputError if the model
    has none, or none that can be replayed."""
    routers = routers_of(policy)
    if not routers:
        raise InputError(f"experts: {model} has no router whose choice of experts is visible; leave `experts` out")
    if experts.replay:
        if not decodes_exactly(policy):
            raise InputError(f"experts.replay: {model} is not sampled packed; set it to false")
        _check_replay(policy, routers, model)
    mark_routers(policy, routers, experts)
    return routers


def mark_routers(policy: Any, routers: Sequence[nn.Module], experts: Experts) -> None:
    """Freezes the routers or prepares them for replay, as `experts` says."""
    if experts.routers == "frozen":
        for router in routers:
            router.requires_grad_(False)
    backbone = backbone_of(policy)
    names = [name for name, module in backbone.named_modules() if module in routers]
    backbone.router_names, backbone.replayed_routers = names, names if experts.replay else []


def mark_adapted_routers(policy: Any, experts: Experts) -> None:
    """Prepares adapters that were put around marked routers as the routers themselves are."""
    for router in marked_routers(policy):
        if experts.routers == "frozen":
            router.requires_grad_(False)
        inner: Any = getattr(router, "base_layer", router)
        router.expert_count = inner.expert_count


def marked_routers(policy: Any) -> list[nn.Module]:
    """The routers that `mark_routers` marked, in module order."""
    backbone = backbone_of(policy)
    return [backbone.get_submodule(name) for name in getattr(backbone, "router_names", ())]


def replayed_routers(policy: Any) -> list[nn.Module]:
    """The routers whose choices are to be replayed, in the order of `prepare_routers`."""
    backbone = backbone_of(policy)
    return [backbone.get_submodule(name) for name in getattr(backbone, "replayed_routers", ())]


def experts_in_pack(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], experts: Sequence[Tensor], device: Any
) -> list[Tensor]:
    """For each router, the experts [N, K] of the tokens of a pack, packed as in `completion_logprobs`.

    `experts`: those of each sequence without its last token, [tokens, routers, K].
    """
    rests = [completion[:-1] for completion in completions]
    packed = pack(prompts, rests, torch.device("cpu"))
    chosen = torch.full((packed.ids.shape[1], *experts[0].shape[1:]), -1)
    for row, of_row in enumerate(experts):
        length, first, start = len(prompts[row]), packed.first[row] + 1, packed.starts[row]
        chosen[first - length : first] = of_row[:length].long()
        chosen[start : start + len(rests[row])] = of_row[length:].long()
    return [*to_device(chosen, device).unbind(1)]


def routers_of(policy: Any) -> list[nn.Module]:
    """The routers of a model, with their adapters, in module order."""
    found: set[nn.Module] = set()

    def look(module: Any, _: Any, output: Any) -> None:
        if _is_routing(output) and any(True for _ in module.parameters()):
            module.expert_count = output[0].shape[1]
            found.add(module)

    hooks = [module.register_forward_hook(look) for module in policy.modules()]
    try:
        _run(policy)
    finally:
        for hook in hooks:
            hook.remove()
    # An adapter around a router returns what the router does.
    return [module for name, module in policy.named_modules() if module in found and not name.endswith(".base_layer")]


def _run(policy: Any) -> Tensor:
    """A forward pass over one sequence of the probe."""
    prompt, completion = probe_sequences(policy)[0]
    with torch.no_grad():
        return completion_logprobs(policy, [prompt], [completion], 1.0)


def _check_replay(policy: Any, routers: list[nn.Module], model: str) -> None:
    """Raises InputError unless replaying different experts changes the routers' choices and replaying the same ones
    changes nothing."""
    try:
        obeyed = _obey(policy, routers)
    except Exception as error:  # any model may fail in any way
        why = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
        raise InputError(f"experts.replay: {model} cannot be told its experts ({why}); set it to false") from error
    if not obeyed:
        raise InputError(f"experts.replay: the routers of {model} choose in a way of their own; set it to false")


def _obey(policy: Any, routers: list[nn.Module]) -> bool:
    with recorded(routers) as before:
        own = _run(policy)
    chosen = [calls[0].experts for calls in before]
    with replayed(routers, chosen):
        same = _run(policy)
    others = [(experts + 1) % calls[0].logits.shape[1] for experts, calls in zip(chosen, before, strict=True)]
    with replayed(routers, others), recorded(routers) as after:
        _run(policy)
    obeyed = all(torch.equal(calls[0].experts, other) for calls, other in zip(after, others, strict=True))
    return obeyed and torch.allclose(own, same, rtol=0, atol=1e-5)


@contextmanager
def recorded(routers: Sequence[nn.Module]) -> Iterator[list[list[Routing]]]:
    """Yields a list per router, to which each of its calls within the context adds what it returned."""
    kept: list[list[Routing]] = [[] for _ in routers]

    def keep(calls: list[Routing]) -> Any:
        return lambda _, __, output: calls.append(Routing(output[0], output[2]))

    hooks = [router.register_forward_hook(keep(calls)) for router, calls in zip(routers, kept, strict=True)]
    try:
        yield kept
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def replayed(routers: Sequence[nn.Module], experts: Sequence[Tensor]) -> Iterator[None]:
    """Context in which each router chooses the given `experts` [N, K], regardless of its logits; -1: its own choice.
    The experts' weights still come from its logits, with gradients (routing replay, arXiv 2510.11370)."""
    before = [router.__dict__.get("forward") for router in routers]
    for router, chosen in zip(routers, experts, strict=True):
        vars(router)["forward"] = _forced(router, chosen)
    try:
        yield
    finally:
        for router, own in zip(routers, before, strict=True):
            if own is None:
                del vars(router)["forward"]
            else:
                vars(router)["forward"] = own


def balance_loss(kept: Sequence[Sequence[Routing]]) -> Tensor:
    """Load-balancing loss from what `recorded` kept: E sum_e f_e P_e, averaged over the routers, where f_e is the share
    of choices that fall on expert e, and P_e its mean probability. 1 if all experts are chosen equally often (arXiv
    2101.03961, equation 4, where each token has one expert)."""
    losses = []
    for calls in kept:
        logits = torch.cat([call.logits for call in calls]).float()
        count = logits.shape[1]
        share = one_hot(torch.cat([call.experts for call in calls]), count).float().mean((0, 1))
        losses.append(count * (share * logits.softmax(1).mean(0)).sum())
    return torch.stack(losses).mean()


def _is_routing(output: Any) -> bool:
    if not (isinstance(output, tuple) and len(output) == 3 and all(isinstance(part, Tensor) for part in output)):
        return False
    logits, weights, experts = output
    shapes = logits.dim() == 2 and weights.shape == experts.shape and experts.shape[:1] == logits.shape[:1]
    return bool(shapes and experts.dtype == torch.int64 and weights.is_floating_point())


def _forced(router: Any, chosen: Tensor) -> Any:
    own, count = router.forward, router.expert_count

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Choosing(chosen, count):
            return own(*args, **kwargs)

    return forward


class _Choosing(TorchFunctionMode):
    """Context in which `topk` over `count` experts returns the given choices. A choice among groups of experts, of
    which there are fewer, is not changed."""

    def __init__(self, chosen: Tensor, count: int):
        self.chosen, self.count = chosen, count

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or result.indices.shape != self.chosen.shape:
            return result
        scores = args[0] if args else (kwargs or {})["input"]
        if scores.shape[-1] != self.count:
            return result
        experts = torch.where(self.chosen < 0, result.indices, self.chosen.to(result.indices.device))
        return torch.return_types.topk((scores.gather(-1, experts), experts))
