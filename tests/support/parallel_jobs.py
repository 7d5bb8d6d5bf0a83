"""The work of the processes of test_parallel.py: functions that every process of a team calls, and the team itself."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import socket
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from grpo.config.common import Hardware, Optimizer
from grpo.distributed import tensor_io
from grpo.distributed.fsdp import Sharded, clip_grad_norm, shard
from grpo.distributed.process_group import Parallel, divide
from grpo.model.loading import load_policy, without_adapters
from grpo.model.logprobs import completion_logprobs
from grpo.model.sharded.loading import load_sharded
from grpo.training.optimizer import make_optimizer

VOCABULARY = 67
ALONE = Parallel.alone(torch.device("cpu"))
FILLER = ([1, 2], 0.0)  # what a process with nothing left to learn learns nothing from


class Team:
    """Processes that joined each other as torchrun's would, and then do what they are told, all the same thing."""

    def __init__(self, world: int):
        self.world = world
        self._start()

    def __call__(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """job(parallel, *args) in each process; their results in the order of their ranks.

        Beside busy processes torch 2.13 rarely crashes when gloo's all-gather ends (once in some 20,000): in
        `wait_tensor`, the finished work's destructor meets memory that is already free. New processes then try once
        more, as a stage's next attempt would, and a warning says so. An exception of the job fails at once."""
        try:
            return self._ask(job, *args)
        except _Died as death:
            warnings.warn(f"{job.__name__}: {death}; tried again", stacklevel=2)
            self.dismiss()
            self._start()
            return self._ask(job, *args)

    def dismiss(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def _start(self) -> None:
        # A server that has loaded the libraries once, and forks.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world, port, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def _ask(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send((job, args))
        results, errors, dead = [], [], []
        for rank, pipe in enumerate(self.pipes):
            try:
                ok, result = pipe.recv() if pipe.poll(600) else (False, "does not answer")
            except (EOFError, ConnectionError):
                dead.append(rank)
                continue
            if ok:
                results.append(result)
            else:
                errors.append(f"rank {rank}: {result}")
        for rank in dead:
            self.processes[rank].join(10)
            raise _Died(f"rank {rank} died with exit code {self.processes[rank].exitcode}")
        assert not errors, errors[0]
        return results


class _Died(Exception):
    """A process of the team ended."""


def _serve(rank: int, world: int, port: int, pipe: Connection) -> None:
    faulthandler.enable()  # where a process dies of a signal
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_PORT": str(port)}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    parallel = Parallel.start(Hardware(device="cpu"))
    while True:
        job, args = pipe.recv()
        try:
            pipe.send((True, job(parallel, *args)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


# Models


def llama(tied: bool = True, head: type = LlamaForCausalLM, **options: Any) -> Any:
    """Random weights, large enough that mistakes show; float64, so that the order of a sum does not."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
    }
    return head(LlamaConfig(**(shape | options))).to(torch.float64)


def wide() -> Any:
    """Rows of 160 and of 256 numbers: one block that is not full, and one that is. 67 rows are divided unevenly."""
    return llama(hidden_size=160, intermediate_size=256, num_hidden_layers=1, initializer_range=0.05).to(torch.float32)


def with_adapters(model: Any) -> Any:
    torch.manual_seed(1)
    wanted = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(model, wanted, autocast_adapter_dtype=False)


MODELS: dict[str, Callable[[], Any]] = {
    "tied": llama,
    "untied": lambda: llama(tied=False),
    "lora": lambda: with_adapters(llama(tied=False)),
    "float32": lambda: llama().to(torch.float32),
    "wide": wide,
}
KINDS = {"wide": "adamw_8bit"}
"""Of optimizers, for the models that are not trained by the usual one."""


# Learning: the loss of a sequence is its negative log-likelihood times a weight


def likelihood(model: Any, tokens: list[int], weight: float) -> Tensor:
    """Through the trunk and the head's bare weights, as packed training does it."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    ids = torch.tensor([tokens])
    hidden = base.model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
    logits = torch.nn.functional.linear(hidden, base.get_output_embeddings().weight)
    return -weight * torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None]).sum()


def sequences(seed: int) -> list[list[int]]:
    """Seven, of 3 to 14 tokens: no number of processes divides them evenly."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [3, 14, 5, 9, 4, 11, 6]
    return [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def adamw(model: Sharded, kind: Any = "adamw") -> torch.optim.Optimizer:
    settings = Optimizer(kind=kind, learning_rate=0.01, weight_decay=0.01)
    return make_optimizer([p for p in model.parameters() if p.requires_grad], settings)


def learn(parallel: Parallel, model: Sharded, optimizer: torch.optim.Optimizer, step: int) -> tuple[float, int]:
    """One optimizer step; a sequence is a micro-batch. Returns the norm of the gradients and how many fillers the
    process needed."""
    everything = sequences(step)
    mine = divide([len(tokens) for tokens in everything], parallel.world)[parallel.rank]
    batches = [(everything[i], 1.0) for i in mine]
    rounds = max(parallel.all_gather(len(batches)))
    fillers = rounds - len(batches)
    for tokens, weight in batches + [FILLER] * fillers:
        (model(likelihood, tokens, weight) / 52).backward()  # tokens in all
    norm = clip_grad_norm(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, fillers


def weights(model: Sharded) -> dict[str, Any]:
    """The whole of what is trained, as numpy."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().numpy().copy()
        for name, p in model.model.named_parameters()
        if p.requires_grad
    }


def states(model: Sharded, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole of what the optimizer keeps, as numpy."""
    return {
        f"{name}.{key}": (t.full_tensor() if hasattr(t, "full_tensor") else t).numpy().copy()
        for name, p in model.model.named_parameters()
        for key, t in optimizer.state[p].items()
    }


def two_steps(parallel: Parallel, name: str, checkpointing: bool = False) -> dict[str, Any]:
    plain = MODELS[name]()
    if checkpointing:
        plain.gradient_checkpointing_enable()
        plain.enable_input_require_grads()
        plain.train()
    model = shard(plain, parallel)
    optimizer = adamw(model)
    (norm, fillers), _ = learn(parallel, model, optimizer, 0), learn(parallel, model, optimizer, 1)
    shares = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())
    return {"norm": norm, "fillers": fillers, "shares": shares, "weights": weights(model)}


def nobody_learns_but_one(parallel: Parallel) -> float:
    """Rank 1 meets a loss that is no number."""
    model = shard(llama(), parallel)
    model(likelihood, [3, 4, 5], float("nan") if parallel.rank == 1 else 1.0).backward()
    return clip_grad_norm(model.parameters(), 1.0)


# Sampling, references


def logits_of(model: Any, tokens: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits


def sample_unevenly(parallel: Parallel, name: str) -> list[bool]:
    """Rank r calls the whole model 2 * r + 1 times; then all learn, and the whole model is a new one."""
    expected = MODELS[name]()
    model = shard(MODELS[name](), parallel)
    optimizer = adamw(model)
    same = []
    with torch.inference_mode(), model.gathered() as whole:
        for number in range(2 * parallel.rank + 1):
            tokens = sequences(number)[1]
            same.append(torch.equal(logits_of(whole, tokens), logits_of(expected, tokens)))
    learn(parallel, model, optimizer, 0)
    alone = shard(expected, ALONE)
    learn(ALONE, alone, adamw(alone), 0)
    with torch.no_grad(), model.gathered() as whole:
        same.append(torch.allclose(logits_of(whole, [5, 6]), logits_of(expected, [5, 6]), rtol=0, atol=1e-9))
        left = {p.device.type for p in whole.parameters()}
    same.append(left == {"cpu"} and (parallel.world == 1 or {p.device.type for p in whole.parameters()} == {"meta"}))
    return same


def reference_first(parallel: Parallel) -> tuple[float, int]:
    """The reference is measured with adapters off, before anything is learnt. Returns its distance from the base model,
    and how many weights learn afterwards."""
    base, model = llama(tied=False), shard(with_adapters(llama(tied=False)), parallel)
    with torch.inference_mode(), without_adapters(model.model):
        found = model(logits_of, [7, 8, 9])
    model(likelihood, [7, 8, 9], 1.0).backward()
    return (found - logits_of(base, [7, 8, 9])).abs().max().item(), sum(p.grad is not None for p in model.parameters())


def forward_after_change(parallel: Parallel) -> float:
    """A forward without gradients, a change of the weights, a forward: the second sees the change."""
    expected, model = llama(), shard(llama(), parallel)
    shares = [*model.parameters()]  # as an optimizer has them
    with torch.no_grad():
        model(logits_of, [1, 2, 3])
        for parameter in (*expected.parameters(), *shares):
            parameter.mul_(0.5)
        return (model(logits_of, [1, 2, 3]) - logits_of(expected, [1, 2, 3])).abs().max().item()


def moving_reference(parallel: Parallel) -> float:
    """The reference moves half of the way to the policy: both are sharded."""
    policy, initial = shard(llama(), parallel), shard(llama().requires_grad_(False), parallel)
    with torch.no_grad():
        for old, new in zip(initial.parameters(), policy.parameters(), strict=True):
            new.mul_(3.0)
            old.lerp_(new, 0.5)
        expected = llama().double()
        for parameter in expected.parameters():
            parameter.mul_(2.0)
        return (initial(logits_of, [1, 2, 3]) - logits_of(expected, [1, 2, 3])).abs().max().item()


# Other heads


def reward_gradients(parallel: Parallel) -> float:
    """Largest difference of a scalar head's gradients from those of the model alone, learning what all learn."""

    def scores(model: Any, tokens: list[int]) -> Tensor:
        return model(input_ids=torch.tensor([tokens])).logits.sum() ** 2

    alone = llama(head=LlamaForSequenceClassification, num_labels=1)
    model = shard(llama(head=LlamaForSequenceClassification, num_labels=1), parallel)
    for rank in range(parallel.world):
        scores(alone, sequences(rank)[0]).backward()
    model(scores, sequences(parallel.rank)[0]).backward()
    return _difference(alone, model)


class Valued(torch.nn.Module):
    """A policy in bfloat16, and a value head of its own in float32 on the policy's states."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = llama().to(torch.bfloat16)
        torch.manual_seed(2)
        self.head = torch.nn.Linear(16, 1)


def value_gradients(parallel: Parallel) -> float:
    """Two passes through the trunk, one backward pass: how PPO learns with a shared trunk."""

    def value(model: Any, tokens: list[int]) -> Tensor:
        hidden = model.policy.model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state
        return model.head(hidden.float()).sum() ** 2

    def chosen(model: Any, tokens: list[int]) -> Tensor:
        return likelihood(model.policy, tokens, 1.0).float()

    alone, model = Valued(), shard(Valued(), parallel)
    tokens = sequences(0)[0]
    for _ in range(parallel.world):
        (chosen(alone, tokens) + value(alone, tokens)).backward()
    (model(chosen, tokens) + model(value, tokens)).backward()
    return _difference(alone, model)


def rounded_arithmetic(parallel: Parallel) -> dict[str, Any]:
    """float32 weights that compute in bfloat16: types, and the share of weights that a step of 1e-6 moves."""
    model = shard(llama().to(torch.float32), parallel, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    before = weights(model)
    loss = model(likelihood, [3, 4, 5, 6], 1.0)
    loss.backward()
    gradients = {p.grad.dtype for p in model.parameters() if p.grad is not None}
    optimizer.step()
    after = weights(model)
    with model.gathered() as whole:
        sampling = {p.dtype for p in whole.parameters()}
    moved = sum((before[name] != after[name]).sum() for name in before) / sum(a.size for a in after.values())
    return {"loss": loss.dtype, "gradients": gradients, "sampling": sampling, "moved": moved}


def _difference(alone: torch.nn.Module, model: Sharded) -> float:
    differences = []
    for a, b in zip(alone.parameters(), model.parameters(), strict=True):
        grad = b.grad.full_tensor() if hasattr(b.grad, "full_tensor") else b.grad
        assert a.grad is not None and grad.dtype == a.grad.dtype
        differences.append(((grad - a.grad).abs().max() / a.grad.abs().max()).item())
    return max(differences)


# Weights by name, folders


def names_and_sums(parallel: Parallel, name: str) -> dict[str, float]:
    return {n: t.sum().item() for n, t in shard(MODELS[name](), parallel).full_tensors()}


def save_model(parallel: Parallel, name: str, folder: Path) -> None:
    shard(MODELS[name](), parallel).save(folder)


def start_and_save(parallel: Parallel, name: str, folder: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, a third step. Returns the weights after the second and after the third."""
    model = shard(MODELS[name](), parallel)
    optimizer = adamw(model, KINDS.get(name, "adamw"))
    learn(parallel, model, optimizer, 0)
    learn(parallel, model, optimizer, 1)
    tensor_io.write(folder, {"policy": model}, {"adamw": optimizer})
    state = states(model, optimizer)
    return {"saved": weights(model), "state": state, "next": _third(parallel, model, optimizer)}


def load_and_go_on(parallel: Parallel, name: str, folder: Path) -> dict[str, Any]:
    model = shard(MODELS[name](), parallel)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    optimizer = adamw(model, KINDS.get(name, "adamw"))
    tensor_io.read(folder, {"policy": model}, {"adamw": optimizer})
    state = states(model, optimizer)
    return {"saved": weights(model), "state": state, "next": _third(parallel, model, optimizer)}


def _third(parallel: Parallel, model: Sharded, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    learn(parallel, model, optimizer, 2)
    return weights(model)


# Talk


def die_once(parallel: Parallel, folder: Path) -> int:
    """Rank 1 is killed the first time, while rank 0 waits for it."""
    if parallel.rank == 1 and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGABRT)
    parallel.barrier()
    return parallel.rank


def talk(parallel: Parallel) -> dict[str, Any]:
    rank = parallel.rank
    stats = {"loss": rank + 1.0, "ratio_max": float(rank), "ratio_min": float(rank)}
    if rank:
        stats["only_others"] = 2.0
    nan = {"ratio_max": float("nan") if rank == 1 else 1.0}
    parallel.barrier()
    return {
        "gathered": parallel.all_gather({"rank": rank, "tokens": [rank] * (rank + 1)}),
        "same": parallel.broadcast(f"from {rank}"),
        "reduced": parallel.reduce(stats),
        "nan": parallel.reduce(nan),
        "dealt": parallel.deal("abcdef"),
        "collected": parallel.collect([letter.upper() for letter in parallel.deal("abcdef")]),
        "main": parallel.is_main,
    }


# Other architectures: gradients of log-probabilities through completion_logprobs, packed and plain


def architecture_gradients(parallel: Parallel, folder: str, attention: str) -> dict[str, Any]:
    """Gradients of the weighted log-probabilities of seven completions, divided among the processes."""
    sharded = load_sharded(folder, Hardware(device="cpu", attention=attention), parallel)  # type: ignore[arg-type]
    rows = [([5, 6, 7], tokens) for tokens in sequences(3)]
    mine = divide([len(tokens) for _, tokens in rows], parallel.world)[parallel.rank]
    prompts, completions = [rows[i][0] for i in mine], [rows[i][1] for i in mine]
    logprobs = sharded(completion_logprobs, prompts, completions, 1.0)
    weights = torch.tensor([1.0 + i for i in mine])[:, None]
    (logprobs * weights).sum().backward()
    gathered = {
        name: parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        for name, parameter in sharded.model.named_parameters()
        if parameter.grad is not None
    }
    return {name: gradient.numpy() for name, gradient in gathered.items()}


def summed_gradients(policy: Any, batches: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """As `architecture_gradients`, of the completions of each batch one after the other, in this process."""
    policy.zero_grad()
    completions = sequences(3)
    for mine in batches:
        logprobs = completion_logprobs(policy, [[5, 6, 7]] * len(mine), [completions[i] for i in mine], 1.0)
        weights = torch.tensor([1.0 + i for i in mine], dtype=logprobs.dtype)[:, None]
        (logprobs * weights).sum().backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def gathered_weights(parallel: Parallel, folder: str, attention: str) -> dict[str, int]:
    """Weights that a training step holds whole at once: the most, all of the model's, those of the largest part that
    is gathered by itself, and of the rest."""
    policy = load_policy(folder, Hardware(device="cpu", attention=attention))  # type: ignore[arg-type]
    weights = sum(parameter.numel() for parameter in policy.parameters())
    sharded = shard(policy, parallel)
    parts = [module for module in sharded.model.modules() if isinstance(module, FSDPModule)]
    sizes = [sum(parameter.numel() for parameter in part.parameters()) for part in parts]
    held: list[int] = []

    def count(*_: Any) -> None:
        held.append(sum(p.numel() for p in sharded.model.parameters() if not isinstance(p, DTensor)))

    def count_in_backward(_: Any, __: Any, output: Any) -> None:
        (output if isinstance(output, Tensor) else output[0]).register_hook(count)

    for part in parts:  # after the hooks that gather it
        part.register_forward_pre_hook(count)
        part.register_forward_hook(count_in_backward)
    sharded(completion_logprobs, [[5, 6, 7]], [[8, 9, 10]], 1.0).sum().backward()
    return {"most": max(held), "all": weights, "part": max(sizes), "rest": weights - sum(sizes), "times": len(held)}
