"""The store under the things that happen to it: kills, full disks, several processes, damaged files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo.errors import InputError
from tasks.store.manifest import MANIFEST, InputRef, Manifest, artifact_key
from tasks.store.store import Store

ROOT = Path(__file__).parents[3]
CONFIG = {"lr": 1e-6, "steps": 3}
KEY = artifact_key("sft", 1, CONFIG, {"data": "d1"})
INPUTS = {"data": InputRef("d1", path="/data/train.parquet")}


def make(store: Store, text: str = "weights", *, force: bool = False, config: dict | None = None) -> Manifest:
    config = CONFIG if config is None else config
    key = artifact_key("sft", 1, config, {"data": "d1"})
    with store.attempt("sft", key, force=force) as attempt:
        (attempt.out / "model").mkdir(exist_ok=True)
        (attempt.out / "model" / "w.bin").write_text(text)
        return attempt.publish(stage_version=1, config=config, inputs=INPUTS, steps_completed=3)


def start(code: str, root: Path, **kwargs) -> subprocess.Popen:
    """Run `code` in another process with `store`, `KEY`, `CONFIG`, `INPUTS` and `make` at hand."""
    prelude = (
        "import os, sys, time, shutil\nfrom pathlib import Path\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]\n"
        f"from test_store import *\nstore = Store(Path({str(root)!r}))\n"
    )
    return subprocess.Popen([sys.executable, "-c", prelude + code], stdout=subprocess.PIPE, text=True, **kwargs)


def kill(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_the_key_is_stable_and_depends_on_each_part():
    assert artifact_key("sft", 1, {"steps": 3, "lr": 0.000001}, {"data": "d1"}) == KEY
    # Pinned: a changed rule for keys silently orphans every artifact that users have.
    pinned = hashlib.sha256(b'{"config":{"a":1},"inputs":{"x":"d"},"stage":"s","version":1}').hexdigest()
    assert artifact_key("s", 1, {"a": 1}, {"x": "d"}) == pinned
    others = [
        artifact_key("rl", 1, CONFIG, {"data": "d1"}),
        artifact_key("sft", 2, CONFIG, {"data": "d1"}),
        artifact_key("sft", 1, CONFIG | {"lr": 2e-6}, {"data": "d1"}),
        artifact_key("sft", 1, CONFIG, {"data": "d2"}),
        artifact_key("sft", 1, CONFIG, {"other": "d1"}),
    ]
    assert len({KEY, *others}) == 6
    with pytest.raises(ValueError, match="not JSON compliant"):
        artifact_key("sft", 1, {"lr": float("nan")}, {})


def test_what_is_published_is_found(tmp_path):
    store = Store(tmp_path)
    assert store.find(KEY) is None and store.list() == []
    with store.attempt("sft", KEY) as attempt:
        (attempt.out / "model").mkdir()
        (attempt.out / "model" / "w.bin").write_bytes(b"abc")
        (attempt.state / "checkpoint").write_text("x")
        made = attempt.publish(
            stage_version=1,
            config=CONFIG,
            inputs=INPUTS,
            counts={"samples": 7},
            metrics={"loss": 0.5, "kl": float("inf")},
            steps_completed=3,
            mlflow_run_id="r",
        )
    found = store.find(KEY)
    assert found == made and found.path == made.path == tmp_path / "artifacts" / "sft" / KEY / "1"
    # sha256("abc"), from FIPS 180
    sha = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert found.files == {"model/w.bin": {"size": 3, "sha256": sha}}
    assert found.counts == {"samples": 7} and found.metrics == {"loss": 0.5, "kl": None} and found.inputs == INPUTS
    assert (found.path / "model" / "w.bin").read_bytes() == b"abc"
    assert not attempt.work.exists()
    assert json.loads((found.path / MANIFEST).read_text()) == found.to_dict()
    assert "path" not in found.to_dict()
    assert store.check(found, every_byte=True) is found
    assert found.local() == found.path and found.local("model/w.bin") == found.path / "model" / "w.bin"
    assert found.location == str(found.path)


def test_equal_contents_under_two_keys_have_two_digests(tmp_path):
    store = Store(tmp_path)
    one, two = make(store), make(store, config={"lr": 2})
    assert one.files == two.files and one.digest != two.digest


def test_the_tokenizer_hash_covers_the_chat_template_and_not_the_weights(tmp_path):
    store = Store(tmp_path)

    def tokenizer_hash(number: int, folder: str, template: str, weights: str) -> str | None:
        config = {"n": number}
        with store.attempt("sft", artifact_key("sft", 1, config, {})) as attempt:
            (attempt.out / folder).mkdir()
            (attempt.out / folder / "tokenizer.json").write_text("{}")
            (attempt.out / folder / "chat_template.jinja").write_text(template)
            (attempt.out / folder / "w.bin").write_text(weights)
            return attempt.publish(stage_version=1, config=config).tokenizer_sha256

    first = tokenizer_hash(0, "model", "a", "1")
    assert first == tokenizer_hash(1, "policy", "a", "2") != tokenizer_hash(2, "model", "b", "1")
    assert make(store).tokenizer_sha256 is None


def test_force_makes_a_new_attempt_and_keeps_the_old(tmp_path):
    store = Store(tmp_path)
    first, second = make(store), make(store, "other", force=True)
    assert (first.attempt, second.attempt) == (1, 2)
    assert store.find(KEY) == second and store.list() == [first, second]
    assert (first.path / "model/w.bin").read_text() == "weights"


def test_publishing_under_a_wrong_key_is_refused(tmp_path):
    with Store(tmp_path).attempt("sft", KEY) as attempt, pytest.raises(AssertionError, match="another config"):
        attempt.publish(stage_version=2, config=CONFIG, inputs=INPUTS)


def test_links_are_refused(tmp_path):
    with Store(tmp_path).attempt("sft", KEY) as attempt:
        (attempt.out / "link").symlink_to("/etc/hostname")
        with pytest.raises(ValueError, match="may not hold links"):
            attempt.publish(stage_version=1, config=CONFIG, inputs=INPUTS)


@pytest.mark.parametrize("damage", ["truncated", "missing", "manifest"])
def test_a_damaged_artifact_is_passed_over_for_an_older_whole_one(tmp_path, caplog, damage):
    store = Store(tmp_path)
    first, second = make(store), make(store, force=True)
    file = second.path / ("manifest.json" if damage == "manifest" else "model/w.bin")
    if damage == "missing":
        file.unlink()
    else:
        os.truncate(file, 4)
    with caplog.at_level(logging.WARNING):
        assert store.find(KEY) == first
    assert "damaged artifact" in caplog.text and str(second.path) in caplog.text
    os.truncate(first.path / "model/w.bin", 1)
    assert store.find(KEY) is None
    assert make(store).attempt == 3


def test_resolve(tmp_path):
    store = Store(tmp_path)
    made = make(store)
    newest = make(store, force=True)
    other = make(store, config={"lr": 3})
    assert store.resolve(KEY) == store.resolve(KEY[:6]) == store.resolve(made.digest[:12]) == newest
    assert store.resolve("latest:sft") == other
    for ref, words in [
        ("latest:rl", "no artifact of stage 'rl'.*stages that have one: sft"),
        ("abc", "6 or more hex"),
        ("../../x", "6 or more hex"),
        ("0" * 12, "no artifact in"),
    ]:
        with pytest.raises(InputError, match=words):
            store.resolve(ref)


def test_a_digest_that_was_seen_is_resolved_without_a_list(tmp_path, monkeypatch):
    """A run resolves its inputs by digest; each list of some hundred artifacts takes a quarter of a second."""
    store = Store(tmp_path)
    first = make(store)
    assert store.resolve(first.digest) == first
    with monkeypatch.context() as patched:
        patched.setattr(store.backend, "manifests", None)
        assert Store(tmp_path, store.backend).resolve(first.digest) == first
    newer = make(store, "other", force=True)
    assert (store.resolve(first.digest), store.resolve(newer.digest)) == (first, newer)


def test_an_ambiguous_prefix_is_refused(tmp_path):
    store, numbers = Store(tmp_path), {}
    for number in range(100_000):  # until two keys share six digits
        key = artifact_key("sft", 1, {"n": number}, {"data": "d1"})
        if key[:6] in numbers:
            break
        numbers[key[:6]] = number
    made, twin = make(store, config={"n": numbers[key[:6]]}), make(store, config={"n": number})
    assert made.key[:6] == twin.key[:6]
    with pytest.raises(InputError, match=r"stands for 2 artifacts.*give more characters"):
        store.resolve(made.key[:6])
    assert store.resolve(made.key[:20]) == made


def test_a_killed_attempt_frees_the_lock_and_keeps_its_work(tmp_path):
    code = """
with store.attempt("sft", KEY) as attempt:
    (attempt.state / "step-2").write_text("checkpoint")
    print("ready", flush=True)
    time.sleep(60)
"""
    child = start(code, tmp_path)
    assert child.stdout.readline() == "ready\n"
    kill(child)
    store = Store(tmp_path)
    assert store.find(KEY) is None
    began = time.monotonic()
    with store.attempt("sft", KEY) as attempt:
        assert time.monotonic() - began < 10
        assert (attempt.state / "step-2").read_text() == "checkpoint"
        assert attempt.continues and not attempt.forced
    assert (attempt.state / "step-2").exists()  # not published: still kept
    with store.attempt("sft", KEY, force=True) as attempt:  # forced: the work of an unforced attempt is not re-entered
        assert list(attempt.state.iterdir()) == []


def test_a_killed_forced_attempt_is_continued_by_force(tmp_path):
    make(Store(tmp_path))
    child = start(
        'with store.attempt("sft", KEY, force=True) as a:\n'
        '    (a.state / "step-2").write_text("x"); print("ready", flush=True); time.sleep(60)',
        tmp_path,
    )
    assert child.stdout.readline() == "ready\n"
    kill(child)
    store = Store(tmp_path)
    assert store.find(KEY).attempt == 1
    with store.attempt("sft", KEY) as attempt:
        assert attempt.continues and attempt.forced  # without being asked again
    with store.attempt("sft", KEY, force=True) as attempt:
        assert (attempt.state / "step-2").exists()
        (attempt.out / "w").write_text("2")
        assert attempt.publish(stage_version=1, config=CONFIG, inputs=INPUTS).attempt == 2


@pytest.mark.parametrize(("where", "published"), [("os.fsync", False), ("os.rename", False), ("shutil.rmtree", True)])
def test_a_kill_during_publication_leaves_all_or_nothing(tmp_path, where, published):
    # The real publication, stopped for good inside one of the calls it makes.
    code = f"""
import tasks.store.store
def stop(*args, **kwargs):
    print("ready", flush=True)
    time.sleep(60)
with store.attempt("sft", KEY) as attempt:
    (attempt.out / "w").write_text("weights")
    (attempt.state / "step-2").write_text("x")
    {where} = stop
    attempt.publish(stage_version=1, config=CONFIG, inputs=INPUTS)
"""
    child = start(code, tmp_path)
    assert child.stdout.readline() == "ready\n"
    kill(child)
    store = Store(tmp_path)
    assert (store.find(KEY) is not None) == published
    assert len(list(tmp_path.glob("artifacts/*/*/*/*"))) == (2 if published else 0)
    with store.attempt("sft", KEY) as attempt:
        kept = sorted(path.name for path in [*attempt.out.iterdir(), *attempt.state.iterdir()])
        if published:
            assert kept == []
        else:
            assert {"w", "step-2"} <= set(kept)
            made = attempt.publish(stage_version=1, config=CONFIG, inputs=INPUTS)
            assert set(made.files) == {"w"} and made.attempt == 1
    assert not attempt.work.exists()


def test_two_processes_at_one_key_publish_once(tmp_path):
    code = """
with store.attempt("sft", KEY) as attempt:
    if found := store.find(KEY):
        print("reused", found.attempt)
    else:
        time.sleep(0.5)
        (attempt.out / "w").write_text("1")
        print("made", attempt.publish(stage_version=1, config=CONFIG, inputs=INPUTS).attempt)
"""
    children = [start(code, tmp_path, stderr=subprocess.PIPE) for _ in range(2)]
    answers = [child.communicate(timeout=60) for child in children]
    assert sorted(out for out, _ in answers) == ["made 1\n", "reused 1\n"]
    assert [m.attempt for m in Store(tmp_path).list()] == [1]
    assert list((tmp_path / "work").iterdir()) == []
    waited = next(err for out, err in answers if out.startswith("reused"))
    assert waited == "" or waited.count("waiting for the lock") == 1


def test_who_waits_is_told_once_who_holds_the_lock(tmp_path, caplog):
    child = start('with store.attempt("sft", KEY):\n    print("ready", flush=True); time.sleep(5)', tmp_path)
    assert child.stdout.readline() == "ready\n"
    with caplog.at_level(logging.WARNING), Store(tmp_path).attempt("sft", KEY):
        pass
    assert child.wait() == 0
    assert caplog.text.count("waiting for the lock") == 1 and f"process {child.pid} on " in caplog.text


def test_a_trainer_that_outlives_its_flow_keeps_the_lock(tmp_path):
    code = """
import subprocess
with store.attempt("sft", KEY) as attempt:
    trainer = subprocess.Popen(["sleep", "60"], pass_fds=[attempt.lock_fd], stdout=subprocess.DEVNULL)
    print(trainer.pid, flush=True)
    time.sleep(60)
"""
    child = start(code, tmp_path)
    trainer = int(child.stdout.readline())
    kill(child)
    second = start('with store.attempt("sft", KEY):\n    print("got it", flush=True)', tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(timeout=2.5)
    os.kill(trainer, signal.SIGKILL)
    assert second.communicate(timeout=20)[0] == "got it\n"


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 512 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    try:
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("mounting a tmpfs needs root")
    except FileNotFoundError:
        pytest.skip("no mount command")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_publishes_nothing_and_says_what_to_do(small_disk):
    store = Store(small_disk)
    words = f"no space left on {small_disk}: free some or move the home folder with R1FLOW_HOME"
    with pytest.raises(InputError, match=words), store.attempt("sft", KEY) as attempt:
        (attempt.out / "w").write_bytes(b"0" * 1_000_000)
    # Room for what the stage makes but none for the manifest.
    with pytest.raises(InputError, match=words), store.attempt("sft", KEY) as attempt:
        (attempt.out / "w").write_bytes(b"0" * 1000)
        fill_up(attempt.state / "checkpoint")
        attempt.publish(stage_version=1, config=CONFIG, inputs=INPUTS)
    assert store.find(KEY) is None and not (small_disk / "artifacts").exists()
    (attempt.state / "checkpoint").unlink()
    with store.attempt("sft", KEY) as attempt:
        assert attempt.publish(stage_version=1, config=CONFIG, inputs=INPUTS).files.keys() == {"w"}
    assert store.find(KEY) is not None


def fill_up(path: Path) -> None:
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"0" * 4096)


def test_a_home_that_may_not_be_written(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="R1FLOW_HOME"), Store(tmp_path).attempt("sft", KEY):
        pass
