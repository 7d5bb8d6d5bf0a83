"""Checkpoints: whole or absent."""

from __future__ import annotations

import io
from pathlib import Path, PosixPath

import pytest
import torch

from grpo.distributed import checkpoint, tensor_io
from grpo.errors import InputError
from tests.support.parallel_jobs import ALONE, Team


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


def test_paths_written_by_any_python_are_read():
    for module in (b"pathlib", b"pathlib._local"):  # before and from Python 3.13
        unpickler = tensor_io._Unpickler(io.BytesIO(b"c" + module + b"\nPosixPath\n."))
        assert unpickler.load() is PosixPath


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


def names(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_the_two_newest_are_kept(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step)
        assert load(tmp_path) == (step, step, {})
    assert names(tmp_path) == ["step-00000010", "step-00000100"]


def empty(path) -> None:
    path.write_bytes(b"")


def truncate(path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


FILES = ["tensors/.metadata", "tensors/__0_0.distcp", "plain.pt", "sha256.json"]


@pytest.mark.parametrize("harm", [empty, truncate, flip, Path.unlink])
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(tmp_path, capsys, harm, file):
    save(tmp_path, 1, text="a")
    save(tmp_path, 2, text="b")
    if file == "sha256.json" and harm is Path.unlink:  # of a version without hashes
        harm(tmp_path / "step-00000002" / file)
        assert load(tmp_path) == (2, 2, {"text": "b"})
        return
    harm(tmp_path / "step-00000002" / file)
    assert load(tmp_path) == (1, 1, {"text": "a"})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"notice: {tmp_path / 'step-00000002'}: unreadable (")
    assert names(tmp_path) == ["damaged-step-00000002", "step-00000001"]
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert load(tmp_path) == (2, 2, {})


def test_the_notice_comes_from_the_machine_whose_log_is_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PET_NODE_RANK", "1")
    save(tmp_path, 1)
    flip(tmp_path / "step-00000001" / "plain.pt")
    assert load(tmp_path) is None
    assert names(tmp_path) == ["damaged-step-00000001"]
    assert capsys.readouterr().err == ""


def test_without_a_checkpoint_before_it_the_job_starts_anew_with_its_own_weights(tmp_path):
    save(tmp_path, 1)
    flip(tmp_path / "step-00000001" / "tensors" / "__0_0.distcp")
    layer = model(-1.0)
    assert checkpoint.load_latest(ALONE, tmp_path, {"policy": layer}, {}) is None
    assert layer.weight.tolist() == [[-1.0, -1.0]]
    assert load(tmp_path) is None


@pytest.mark.parametrize("harm", [empty, truncate, Path.unlink])
@pytest.mark.parametrize("file", FILES[:3])
def test_a_checkpoint_of_a_version_without_hashes_must_be_readable(tmp_path, harm, file):
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "step-00000002" / "sha256.json").unlink()
    harm(tmp_path / "step-00000002" / file)
    assert load(tmp_path) == (1, 1, {})


def test_a_checkpoint_that_refers_to_damaged_weights_is_damaged_too(tmp_path):
    def refers_to(plain):
        return [tmp_path / plain["best"]]

    for step, best in ((1, "best-1"), (2, "best-2")):
        checkpoint.save_weights(ALONE, tmp_path / best, {"policy": model(step)})
        save(tmp_path, step, best=best)
    flip(tmp_path / "best-2" / "tensors" / "__0_0.distcp")
    layer = model(-1.0)
    with pytest.raises(InputError, match="has changed since it was written; run the same command again"):
        checkpoint.load_weights(ALONE, tmp_path / "best-2", {"policy": layer})
    assert layer.weight.tolist() == [[-1.0, -1.0]]
    found = checkpoint.load_latest(ALONE, tmp_path, {"policy": layer}, {}, refers_to)
    assert found == (1, {"best": "best-1"})


def test_every_process_goes_back_when_one_of_them_finds_damage(tmp_path):
    team = Team(2)
    try:
        team(save_in_a_team, tmp_path, 1)
        team(save_in_a_team, tmp_path, 2)
        assert names(tmp_path / "step-00000002" / "tensors") == [".metadata", "__0_0.distcp", "__1_0.distcp"]
        for file in FILES[:3]:
            flip(tmp_path / "step-00000002" / file)
            assert team(load_in_a_team, tmp_path) == [1, 1]
            team(save_in_a_team, tmp_path, 2)
            assert team(load_in_a_team, tmp_path) == [2, 2]
    finally:
        team.dismiss()


def save_in_a_team(parallel, state, step: int) -> None:
    checkpoint.save(parallel, state, step, {"policy": model(step)}, {}, {})


def load_in_a_team(parallel, state) -> int:
    found = checkpoint.load_latest(parallel, state, {"policy": model(-1.0)}, {})
    return found[0] if found else 0


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
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert names(tmp_path / "step-00000002") == ["plain.pt", "sha256.json", "tensors"]


def test_a_kill_before_the_older_one_is_removed(tmp_path):
    save(tmp_path, 2)
    (tmp_path / "step-00000001" / "tensors").mkdir(parents=True)
    assert load(tmp_path) == (2, 2, {})
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
