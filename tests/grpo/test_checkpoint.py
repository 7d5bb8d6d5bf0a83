"""Checkpoints: whole or absent."""

from __future__ import annotations

import pytest
import torch

from grpo import checkpoint


def test_nothing_saved(tmp_path):
    assert checkpoint.load_latest(tmp_path / "state") is None


def test_round_trip(tmp_path):
    payload = {"policy": {"w": torch.arange(3.0)}, "samples": [{"step": 1, "text": "é"}]}
    checkpoint.save(tmp_path / "state", 7, payload)
    step, loaded = checkpoint.load_latest(tmp_path / "state")
    assert step == 7
    assert torch.equal(loaded["policy"]["w"], torch.arange(3.0))
    assert loaded["samples"] == payload["samples"]


def test_only_the_newest_is_kept(tmp_path):
    for step in (9, 10, 100):
        checkpoint.save(tmp_path, step, {"step": step})
        assert checkpoint.load_latest(tmp_path) == (step, {"step": step})
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000100"]


def test_a_kill_while_writing_leaves_the_older_one(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, {"step": 1})

    def killed(payload, file):
        file.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, 2, {"step": 2})
    assert checkpoint.load_latest(tmp_path) == (1, {"step": 1})
    checkpoint.save(tmp_path, 2, {"step": 2})
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]


def test_a_kill_before_the_older_one_is_removed(tmp_path):
    checkpoint.save(tmp_path, 2, {"step": 2})
    torch.save({"step": 1}, tmp_path / "step-00000001")
    assert checkpoint.load_latest(tmp_path) == (2, {"step": 2})


def test_clear(tmp_path):
    checkpoint.save(tmp_path / "state", 1, {})
    checkpoint.clear(tmp_path / "state")
    checkpoint.clear(tmp_path / "state")
    assert checkpoint.load_latest(tmp_path / "state") is None
