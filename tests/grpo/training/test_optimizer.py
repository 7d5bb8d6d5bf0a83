"""AdamW with moments of 8 bits, by the real bitsandbytes, beside the usual one."""

from __future__ import annotations

import sys

import pytest
import torch

from grpo.config.common import Optimizer
from grpo.distributed import tensor_io
from grpo.errors import InputError
from grpo.training.optimizer import make_optimizer
from grpo.training.optimizers.adamw_8bit import AdamW8bit
from tests.support.job_runner import PRETRAIN, kill_at, metrics, run, same, weights, write_job


class Two(torch.nn.Module):
    """Rows of `width` numbers, and of 512."""

    def __init__(self, width: int):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(width, 512), torch.nn.Linear(512, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def optimizer_for(module: torch.nn.Module, kind: str, **options) -> torch.optim.Optimizer:
    return make_optimizer(module.parameters(), Optimizer(kind=kind, learning_rate=1e-3, **options))


def losses(kind: str, width: int, dtype: torch.dtype) -> tuple[list[float], torch.optim.Optimizer]:
    model = Two(width).to(dtype)
    x, y = torch.randn(64, width, dtype=dtype), torch.randn(64, width, dtype=dtype)
    optimizer = optimizer_for(model, kind, weight_decay=0.1)
    found = []
    for _ in range(30):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, optimizer


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(t.numel() * t.element_size() for state in optimizer.state.values() for t in state.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [512, 320])
def test_the_loss_falls_as_with_moments_of_32_bits(width, dtype):
    (usual, _), (eight, _) = losses("adamw", width, dtype), losses("adamw_8bit", width, dtype)
    assert usual[-1] < 0.1 * usual[0]
    # Within 2% of what there was at first, at each of 30 steps.
    assert max(abs(a - b) for a, b in zip(usual, eight, strict=True)) < 0.02 * usual[0]


@pytest.mark.parametrize("width", [512, 320])
def test_the_state_takes_a_quarter(width):
    (_, usual), (_, eight) = losses("adamw", width, torch.float32), losses("adamw_8bit", width, torch.float32)
    weights = 2 * 512 * width
    # Both moments of a weight: 8 bytes, or two codes and two scales of 4 bytes a row and started block of 256.
    scales = 2 * 4 * (512 * -(-width // 256) + width * 2)
    biases = 8 * (512 + width)  # too small for codes
    counts = 4 * 4  # of steps, one a tensor
    assert state_bytes(usual) == 8 * weights + biases + counts
    assert state_bytes(eight) == 2 * weights + scales + biases + counts


def test_the_first_step_is_adams_and_decays_the_weights():
    # Adam's first step is the learning rate, in the direction of the gradient's sign; decay takes 0.001 * 0.5 off.
    layer = torch.nn.Linear(256, 16, bias=False)
    torch.nn.init.ones_(layer.weight)
    optimizer = optimizer_for(layer, "adamw_8bit", weight_decay=0.5)
    layer.weight.grad = torch.full((16, 256), 3.0)
    layer.weight.grad[:, 1] = -3.0
    optimizer.step()
    torch.testing.assert_close(layer.weight[:, 0], torch.full((16,), 1 - 0.0005 - 0.001))
    torch.testing.assert_close(layer.weight[:, 1], torch.full((16,), 1 - 0.0005 + 0.001))


def test_rows_without_gradients_stay_where_they_are():
    # The embeddings of tokens that do not occur: a block of zeros has no largest number to be scaled by.
    table = torch.nn.Embedding(64, 200)
    before = table.weight.detach().clone()
    optimizer = optimizer_for(table, "adamw_8bit")
    for _ in range(2):
        table(torch.tensor([3])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = (table.weight != before).any(1)
    assert moved.nonzero().flatten().tolist() == [3] and table.weight.isfinite().all()


def test_what_is_larger_than_one_piece_is_updated_whole(monkeypatch):
    results = []
    for pieces in (2**20, 512 * 7):  # 7 rows at a time
        monkeypatch.setattr("grpo.training.optimizers.adamw_8bit.AT_ONCE", pieces)
        layer = torch.nn.Linear(512, 100)
        torch.nn.init.ones_(layer.weight)
        optimizer = optimizer_for(layer, "adamw_8bit")
        for seed in range(3):
            layer.weight.grad = torch.randn(100, 512, generator=torch.Generator().manual_seed(seed))
            optimizer.step()
        results.append(layer.weight.detach())
    assert torch.equal(*results)


def test_a_checkpoint_goes_on_bit_by_bit(tmp_path):
    def step(model, optimizer, seed):
        model(torch.randn(8, 320, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model = Two(320)
    optimizer = optimizer_for(model, "adamw_8bit")
    step(model, optimizer, 0)
    tensor_io.write(tmp_path, {"model": model}, {"adamw": optimizer})
    other = Two(320)
    resumed = optimizer_for(other, "adamw_8bit")
    tensor_io.read(tmp_path, {"model": other}, {"adamw": resumed})
    for each, its in ((model, optimizer), (other, resumed)):
        step(each, its, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_the_checkpoint_of_another_kind_is_refused(tmp_path):
    model = Two(320)
    for kind in ("adamw", "adamw_8bit"):
        optimizer = optimizer_for(model, kind)
        model(torch.ones(1, 320)).sum().backward()
        optimizer.step()
        tensor_io.write(tmp_path / kind, {"model": model}, {"adamw": optimizer})
    for kind, folder in (("adamw", "adamw_8bit"), ("adamw_8bit", "adamw")):
        with pytest.raises(InputError, match=r"first\.weight\.exp_avg_scale is .* take the settings it was made with"):
            tensor_io.read(tmp_path / folder, {"model": model}, {"adamw": optimizer_for(model, kind)})


def test_without_bitsandbytes_one_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    monkeypatch.delitem(sys.modules, "grpo.training.optimizers.adamw_8bit")
    with pytest.raises(InputError, match="'adamw_8bit' needs bitsandbytes .* pip install bitsandbytes, or take"):
        optimizer_for(Two(320), "adamw_8bit")


def test_a_device_that_it_has_no_kernels_for_is_refused():
    with pytest.raises(InputError, match="does not work on device 'meta'; take 'adamw'"):
        optimizer_for(Two(320).to("meta"), "adamw_8bit")


WIDER = {
    **PRETRAIN,
    "hidden": 160,
    "feed_forward": 256,
    "optimizer": {"kind": "adamw_8bit", "learning_rate": 0.003},
    "save_every": 7,
}


@pytest.mark.slow
def test_a_killed_job_goes_on_bit_by_bit_and_learns_as_with_32_bits(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n\n".join(f"What is {a} + {b}? {a + b}" for a in range(20) for b in range(20)))
    usual = {**WIDER, "optimizer": {"learning_rate": 0.003}}
    for name, settings in (("whole", WIDER), ("usual", usual)):
        run(write_job(tmp_path / name, "pretrain", settings=settings, corpus=corpus))
    killed = write_job(tmp_path / "killed", "pretrain", settings=WIDER, corpus=corpus)
    kill_at(killed, 10)
    run(killed)
    assert same(weights(tmp_path / "killed"), weights(tmp_path / "whole"))
    eight, full = ([r["loss"] for r in metrics(tmp_path / name)] for name in ("whole", "usual"))
    assert full[-1] < 0.5 * full[0]
    assert abs(eight[-1] - full[-1]) < 0.02 * full[0]


def test_small_tensors_keep_torchs_state():
    model = Two(320)
    optimizer = optimizer_for(model, "adamw_8bit")
    model(torch.ones(1, 320)).sum().backward()
    optimizer.step()
    assert isinstance(optimizer, AdamW8bit)
    assert optimizer.state[model.first.bias]["exp_avg"].dtype == torch.float32
    assert optimizer.state[model.first.weight]["exp_avg"].dtype == torch.uint8
