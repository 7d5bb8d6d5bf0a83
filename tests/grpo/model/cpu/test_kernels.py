"""Compiled loops say what torch says, in value and in gradient, for sizes that no number of lanes divides."""

from __future__ import annotations

import math
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from grpo.model.cpu import kernels

ROOT = Path(__file__).parents[4]

SHAPES = [(1, 2), (3, 10), (70, 33), (200, 96)]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def of_norm(x, weight, eps=1e-5):
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def gradients(function, inputs, gradient):
    """By autograd, in float64."""
    exact = [x.double().requires_grad_() for x in inputs]
    return [g.float() for g in torch.autograd.grad(function(*exact), exact, gradient.double())]


def test_only_float32_on_a_cpu_is_served():
    x = normal(2, 2)
    assert kernels.supports(x) and not kernels.supports(x, x.double()) and not kernels.supports(x.to("meta"))


@pytest.mark.parametrize("shape", SHAPES)
def test_norm(shape):
    x, weight, gradient = normal(*shape), normal(shape[1], seed=1), normal(*shape, seed=2)
    found, inverse = kernels.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found, of_norm(x, weight))
    of_x, of_weight = kernels.rms_norm_backward(gradient, x, weight, inverse)
    expected = gradients(of_norm, (x, weight), gradient)
    torch.testing.assert_close(of_x, expected[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(of_weight, expected[1], atol=1e-4, rtol=1e-4)


def test_a_norm_by_hand():
    # The mean square of (1, 7) is 25: (1, 7) / 5, by weights 5 and 10.
    found, inverse = kernels.rms_norm(torch.tensor([[1.0, 7.0]]), torch.tensor([5.0, 10.0]), 0.0)
    assert found.tolist() == [[1.0, 14.0]] and inverse.tolist() == [pytest.approx(0.2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_added_before_a_norm_stays(shape):
    x, y, weight = normal(*shape), normal(*shape, seed=1), normal(shape[1], seed=2)
    total = x + y
    torch.testing.assert_close(kernels.add_rms_norm(x, y, weight, 1e-5), of_norm(total, weight))
    assert torch.equal(x, total)


def test_turning():
    # By a quarter: (a, b) becomes (-b, a), and back. The third head is left out.
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
    cos, sin = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
    turned = kernels.rotary(x, cos, sin, 2, -1)
    assert turned.tolist() == [[[-2.0, 1.0], [-4.0, 3.0]]]
    assert torch.equal(kernels.rotary(turned, cos, sin, 2, 1), x[:, :2])


@pytest.mark.parametrize("shape", SHAPES)
def test_gate(shape):
    gated, raised, gradient = 5 * normal(*shape), normal(*shape, seed=1), normal(*shape, seed=2)
    inner = silu(gated) * raised
    torch.testing.assert_close(kernels.swiglu(gated, raised), inner)
    torch.testing.assert_close(kernels.swiglu_fused(torch.cat([gated, raised], 1)), inner)
    found = kernels.swiglu_backward(gradient, gated, raised)
    expected = gradients(lambda a, b: silu(a) * b, (gated, raised), gradient)
    torch.testing.assert_close(found, (inner, *expected), atol=1e-5, rtol=1e-5)


def test_large_numbers_in_a_gate():
    found = kernels.swiglu(torch.tensor([[-1000.0, -90.0, 0.0, 90.0, 1000.0]]), torch.ones(1, 5))
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.0, 0.0, 90.0, 1000.0]]))


def test_sums_of_rows():
    x = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    # The first total is of rows 2 and 0, the second of none, the third of row 0.
    found = kernels.sum_rows(x, torch.tensor([2, 0, 0]), torch.tensor([2, 2, 3]))
    assert found.tolist() == [[101.0, 202.0], [0.0, 0.0], [1.0, 2.0]]


@pytest.mark.parametrize("heads", [2, 6])
def test_a_token_looks_at_its_prompt_and_at_what_its_row_has_said(heads):
    rows, groups, width, prompt = 3, 2, 8, 5
    states = normal(rows, heads + 2 * groups, width)
    q, k, v = states.split([heads, groups, groups], 1)  # parts of one product, as in a model
    cache = [normal(rows + 1, groups, 7, width, seed=seed) for seed in (1, 2)]
    said = torch.tensor([0, 3, 6])
    before = [normal(2, groups, prompt, width, seed=seed) for seed in (3, 4)]  # of two prompts
    of = torch.tensor([1, 0, 1])
    scale, repeat = 0.3, heads // groups
    asked = q.view(rows, groups, repeat, width)
    scores = torch.einsum("ngrd,ngpd->nrgp", asked, before[0][of]) * scale
    found = torch.einsum("nrgp,ngpd->nrgd", scores.softmax(-1), before[1][of])
    place = torch.tensor([2, 0, 1])  # where each row's is
    elsewhere = torch.empty_like(found), torch.empty(rows, repeat, groups)
    elsewhere[0][place], elsewhere[1][place] = found, scores.logsumexp(-1)
    seen = kernels.decode_attention((q, k, v), cache, said, (*elsewhere, place), scale)
    for row, count in enumerate(said.tolist()):
        assert torch.equal(cache[0][row, :, count], k[row]) and torch.equal(cache[1][row, :, count], v[row])
        keys, values = (torch.cat([p[of[row]], c[row, :, : count + 1]], 1) for p, c in zip(before, cache, strict=True))
        expected = scaled_dot_product_attention(q[row][:, None], keys, values, scale=scale, enable_gqa=True)[:, 0]
        torch.testing.assert_close(seen[row], expected)


def test_a_draw_by_hand():
    # Masses 1, 2, 0, 5 of 8: the shares end at 1/8, 3/8, 3/8 and 1.
    logits = torch.tensor([1.0, 2.0, 0.0, 5.0]).log().expand(6, 4)
    chances = torch.tensor([0.0, 0.124, 0.126, 0.374, 0.376, 1 - 2**-53], dtype=torch.float64)
    tokens, logprobs = kernels.sample_tokens(logits, chances)
    assert tokens.tolist() == [0, 0, 1, 1, 3, 3]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([1, 1, 2, 2, 5, 5]) / 8)


@pytest.mark.parametrize("count", [1, 64, 337, 5000])
def test_draws_follow_the_distribution(count):
    # Chances spread evenly fall on a token as often as its probability says, up to one at either end.
    logits, draws = 3 * normal(count), 4000
    chances = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    tokens, logprobs = kernels.sample_tokens(logits.expand(draws, count), chances)
    expected = logits.double().log_softmax(0)
    torch.testing.assert_close(logprobs.double(), expected[tokens], atol=1e-5, rtol=0)
    assert (tokens.bincount(minlength=count) - draws * expected.exp()).abs().max() <= 1.01
    assert (tokens.diff() >= 0).all()


def test_nan_stays_nan():
    x, weight = normal(3, 5), torch.ones(5)
    x[1, 2] = math.nan
    for found in (
        kernels.rms_norm(x, weight, 1e-5)[0],
        kernels.add_rms_norm(x.clone(), torch.zeros(3, 5), weight, 1e-5),
    ):
        assert found.isnan().any(1).tolist() == [False, True, False]
    for found in (kernels.swiglu(x, torch.ones(3, 5)), *kernels.swiglu_backward(torch.ones(3, 5), x, torch.ones(3, 5))):
        assert found.isnan().nonzero().tolist() == [[1, 2]]
    _, logprobs = kernels.sample_tokens(x, torch.full((3,), 0.5, dtype=torch.float64))
    assert logprobs.isnan().tolist() == [False, True, False]


TWO_CALLERS = """
import threading, numba, torch
from grpo.model.cpu import kernels

torch.set_num_threads(1)
x, weight, threads = torch.randn(2000, 64), torch.ones(64), []
def many():
    for _ in range(100):
        kernels.rms_norm(x, weight, 1e-5)
    threads.append((numba.get_num_threads(), torch.get_num_threads()))
callers = [threading.Thread(target=many) for _ in range(2)]
[caller.start() for caller in callers], [caller.join() for caller in callers]
print(threads)
"""


@pytest.mark.parametrize("layer", ["workqueue", "default"])
def test_two_threads_may_call_loops_which_use_as_many_threads_as_torch(layer):
    environment = os.environ | {"NUMBA_THREADING_LAYER": layer}
    done = subprocess.run([sys.executable, "-c", TWO_CALLERS], env=environment, capture_output=True, text=True)
    assert done.stdout == "[(1, 1), (1, 1)]\n", done.stderr


EACH_LOOP = """
import hashlib, torch
from grpo.model.cpu import kernels as k

n, rows = torch.randn, 70
torch.manual_seed(0)
x, weight = n(rows, 96), n(96)
normed, inverse = k.rms_norm(x, weight, 1e-5)
made = [normed, inverse, *k.rms_norm_backward(n(rows, 96), x, weight, inverse)]
made += [k.add_rms_norm(x.clone(), n(rows, 96), weight, 1e-5)]
made += [k.rotary(n(rows, 5, 32), n(rows, 1, 32), n(rows, 1, 32), 4, -1), k.swiglu_fused(n(rows, 576))]
made += [k.swiglu(n(rows, 288), n(rows, 288)), *k.swiglu_backward(*n(3, rows, 288))]
made += [k.sum_rows(x, torch.randint(0, rows, (2 * rows,)), torch.arange(2, 2 * rows + 2, 2))]
new, cache = n(rows, 15, 32).split([9, 3, 3], 1), n(2, rows + 1, 3, 80, 32)
elsewhere = n(7, 3, 3, 32), n(7, 3, 3), torch.randint(0, 7, (rows,))
made += [k.decode_attention(new, cache, torch.randint(0, 79, (rows,)), elsewhere, 0.2)]
made += k.sample_tokens(n(rows, 843), torch.rand(rows, dtype=torch.float64))
narrow = n(rows, 96).bfloat16()
normed, inverse = k.rms_norm(narrow, weight, 1e-5)
made += [normed, inverse, *k.rms_norm_backward(n(rows, 96).bfloat16(), narrow, weight, inverse)]
made += k.swiglu_backward(*n(3, rows, 288).bfloat16())
for part in made:
    print(hashlib.sha256(part.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest())
"""


CPUS = {"this machine's": {}, "avx2": {"NUMBA_CPU_NAME": "haswell"}, "sse2": {"NUMBA_CPU_NAME": "x86-64"}}


@pytest.mark.system
@pytest.mark.parametrize("cpu", [pytest.param(cpu, marks=[pytest.mark.slow] if CPUS[cpu] else []) for cpu in CPUS])
def test_a_first_and_a_second_process_compute_the_same_bits(tmp_path, cpu):
    # Numba optimizes what it keeps on disk once more than what it has just compiled: on AVX2 that changes the order in
    # which `rms_norm_backward` sums, unless each process runs what is on disk.
    if cpu != "this machine's" and platform.machine() != "x86_64":
        pytest.skip("the stepped-down CPUs are x86")
    features = {"NUMBA_CPU_FEATURES": ""} if CPUS[cpu] else {}
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)} | CPUS[cpu] | features
    first, second = (
        subprocess.run([sys.executable, "-c", EACH_LOOP], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    )
    assert len(first.stdout.splitlines()) == 22 and first.stdout == second.stdout


@pytest.mark.system
def test_a_loop_is_compiled_anew_if_a_helper_in_another_file_changes(tmp_path):
    shutil.copytree(ROOT / "grpo", tmp_path / "grpo", ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}

    def of_one() -> float:
        code = "import torch; from grpo.model.cpu import kernels as k; one = torch.ones(1, 1).bfloat16()"
        command = [sys.executable, "-P", "-c", f"{code}; print(k.swiglu_backward(one, one, one)[0].item())"]
        return float(subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=True).stdout)

    loops = tmp_path / "grpo" / "model" / "cpu" / "loops.py"
    before = of_one()
    sigmoid = "np.float32(1) / (np.float32(1) + _exp(-x))"
    assert loops.read_text().count(sigmoid) == 1
    loops.write_text(loops.read_text().replace(sigmoid, f"np.float32(2) * {sigmoid}"))
    assert (before, of_one()) == (0.73046875, 1.4609375)  # the sigmoid of 1 is 0.7311; bfloat16 has 8 bits


class TestBfloat16:
    """Loops for bfloat16 say what those for float32 say of the same numbers, rounded once."""

    def test_which_tensors_are_served(self):
        x = normal(2, 2).bfloat16()
        assert (
            kernels.supports_float32_or_bfloat16(x, x)
            and kernels.supports_float32_or_bfloat16(x.float())
            and not kernels.supports(x)
        )
        assert not any(map(kernels.supports_float32_or_bfloat16, (x.half(), x.to("meta"))))
        assert not kernels.supports_float32_or_bfloat16(x, x.float())

    def test_rounding_by_hand(self):
        # The sigmoid of 80 is 1, so `up` gets 80 times the gradient, and `gate` gradient * up. There are 8 bits:
        # 17/16 * 17/16 = 1 + 1/8 + 1/256 lies between 1 + 1/8 and 1 + 17/128, of which the first is even;
        # 3 * 129/128 = 3 + 3/128 lies between 3 + 2/128 and 3 + 4/128, of which the second is even.
        gate = torch.full((1, 2), 80.0).bfloat16()
        gradient, up = torch.tensor([[17 / 16, 3.0]]).bfloat16(), torch.tensor([[17 / 16, 129 / 128]]).bfloat16()
        _, of_gate, of_up = kernels.swiglu_backward(gradient, gate, up)
        assert of_gate.tolist() == [[1.125, 3.03125]] and of_up.tolist() == [[85.0, 240.0]]
        one = torch.ones(1, 1, dtype=torch.bfloat16)
        assert kernels.rms_norm(one, torch.tensor([torch.inf]), 0.0)[0].item() == torch.inf
        all_ones = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # NaN, which rounding up would end
        assert kernels.rms_norm(one, all_ones, 0.0)[0].isnan().all()

    @pytest.mark.parametrize("shape", SHAPES)
    def test_norm(self, shape):
        x, weight, gradient = (normal(*of, seed=seed).bfloat16() for seed, of in enumerate((shape, shape[1:], shape)))
        wide = [of.float() for of in (x, weight, gradient)]
        found, inverse = kernels.rms_norm(x, weight, 1e-5)
        expected, exact = kernels.rms_norm(wide[0], wide[1], 1e-5)
        torch.testing.assert_close(found, expected.bfloat16(), atol=0, rtol=2**-7)
        torch.testing.assert_close(inverse, exact)
        of_x, of_weight = kernels.rms_norm_backward(gradient, x, weight, inverse)
        expected_x, expected_weight = kernels.rms_norm_backward(wide[2], wide[0], wide[1], exact)
        torch.testing.assert_close(of_x, expected_x.bfloat16(), atol=1e-6, rtol=2**-7)
        torch.testing.assert_close(of_weight, expected_weight.bfloat16(), atol=1e-5, rtol=2**-7)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_gradients_of_swiglu(self, shape):
        gate, up, gradient = (normal(*shape, seed=seed).bfloat16() for seed in range(3))
        wide = [of.float() for of in (gradient, gate, up)]
        for found, expected in zip(
            kernels.swiglu_backward(gradient, gate, up), kernels.swiglu_backward(*wide), strict=True
        ):
            torch.testing.assert_close(found, expected.bfloat16(), atol=1e-6, rtol=2**-7)
