"""Checkpoints: whole or absent."""

from __future__ import annotations

import pytest
import torch

from grpo.distributed import checkpoint, tensor_io
from tests.support.parallel_jobs import ALONE


def model(value: float) -> torch.nn.Module:
    layer = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(layer.weight, value)
    return layer


def save(state, step: int, **plain) -> None:
    checkpoint.save(ALONE, state, step, {"policy": model(step)}, {}, plain)


def load(state) -> tuple[int, float, dict] | None:
    """Step, weight, plain data."""
    layer = model(-1.0)
    found = checkpoint.load_latest(ALONE, state, {"policy": layer}, {})
    return found and (found[0], layer.weight[0, 0].item(), found[1])


def test_nothing_saved(tmp_path):
    assert load(tmp_path / "state") is None


def test_round_trip(tmp_path):
    plain = {"samples": [{"step": 1, "text": "é"}], "advantages": [torch.arange(3.0)]}
    save(tmp_path / "state", 7, **plain)
    step, weight, loaded = load(tmp_path / "state")
    assert (step, weight) == (7, 7.0)
    assert loaded["samples"] == plain["samples"]
    assert torch.equal(loaded["advantages"][0], torch.arange(3.0))


def test_the_optimizer_goes_on_where_it_was(tmp_path):
    layer = model(1.0)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    for _ in range(2):
        layer(torch.ones(2)).backward()
        optimizer.step()
    checkpoint.save(ALONE, tmp_path, 2, {"policy": layer}, {"adamw": optimizer}, {})
    other = model(5.0)
    resumed = torch.optim.AdamW(other.parameters(), lr=0.1)
    checkpoint.load_latest(ALONE, tmp_path, {"policy": other}, {"adamw": resumed})
    for each, its in ((layer, optimizer), (other, resumed)):
        its.zero_grad()
        each(torch.ones(2)).backward()
        its.step()
    assert torch.equal(layer.weight, other.weight)


def test_only_the_newest_is_kept(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step)
        assert load(tmp_path) == (step, step, {})
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000100"]


@pytest.mark.parametrize(("where", "name"), [(tensor_io, "write"), (checkpoint, "_sync")])
def test_a_kill_while_writing_leaves_the_older_one(tmp_path, monkeypatch, where, name):
    save(tmp_path, 1)

    def killed(*_):
        (tmp_path / "writing" / "half").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(where, name, killed)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2)
    assert load(tmp_path) == (1, 1, {})
    save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]
    assert sorted(p.name for p in (tmp_path / "step-00000002").iterdir()) == ["plain.pt", "tensors"]


def test_a_kill_before_the_older_one_is_removed(tmp_path):
    save(tmp_path, 2)
    (tmp_path / "step-00000001" / "tensors").mkdir(parents=True)
    assert load(tmp_path) == (2, 2, {})
    save(tmp_path, 3)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]
