"""`r1 export --push` with the real client, against a server that speaks the hub's API; data sets in folders."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
import yaml

from grpo.data.records import Problem, Sample, write_rows
from grpo.data.template import parse, render
from tasks.sft_data.card import write_card
from tasks.sft_data.mix import mix
from tasks.sft_data.mix_settings import MixSettings
from tasks.store.manifest import Manifest
from tests.support.hub import TOKEN, Hub, running_hub
from tests.support.published import publish
from tests.support.r1 import ROOT
from tests.support.vllm_models import tiny_llama


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Manifest]:
    """A model and data sets in a store."""
    home = tmp_path_factory.mktemp("home")
    problems = [
        Problem(str(i), [{"role": "user", "content": f"{i} - 1?"}], str(i - 1), "number", "reasoning", "en", "sums")
        for i in range(20)
    ]
    (home / "problems").mkdir()
    for name, part in (("train", problems[:12]), ("held_out", problems[12:])):
        write_rows(home / "problems" / f"{name}.parquet", part, Problem)
    samples = []
    for i in range(12):
        text = render(f"one less than {i}", f"{i - 1}")
        parts = parse(text)
        found = (text, parts.reasoning, parts.summary, str(i - 1), {}, 9, "stop")
        samples.append(Sample(str(i), "digest", *found, "reasoning", "en", 0, "sums", "torch", 3, "kept", ""))
    write_rows(home / "shard.parquet", samples, Sample)
    known = {problem.id: problem for problem in problems}
    settings = MixSettings(licences={"sums": "mit"}, validation_share=0.25)
    statistics = mix([home / "shard.parquet"], lambda _: known, settings, 0, home / "data")
    write_card(home / "data", statistics, {"title": "Sums"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("R1FLOW_HOME", str(home / "store"))
        base = publish("base", {}, {}, Path(tiny_llama(home / "base", tied=True)))
        (base.path / "zero_template.txt").write_text("User: {prompt}\nAssistant:")
        return {
            "problems": publish("problems", {}, {}, home / "problems"),
            "sft_data": publish("sft_data", {}, {}, home / "data"),
            "base": base,
            "sft": publish("sft", {}, {"base": base.ref}, Path(tiny_llama(home / "model", tied=True))),
        }


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


def export(made: dict[str, Manifest], *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    home = made["sft"].path.parents[3]
    own = {"R1FLOW_HOME": str(home), "HF_HOME": str(home / "hf"), "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", "flows.cli", "export", *arguments]
    return subprocess.run(command, env={**clean, **own}, capture_output=True, text=True, cwd=home)


def pushed(hub: Hub, made: dict[str, Manifest], *arguments: str) -> subprocess.CompletedProcess[str]:
    return export(made, *arguments, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)


def snippet(card: str) -> str:
    (found,) = re.findall(r"^```python\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)
    return str(found)


def test_a_model_is_at_the_hub_byte_for_byte_in_a_private_repository(hub: Hub, made: dict[str, Manifest]) -> None:
    pushes = made["sft"].path.parents[3] / "pushes"
    (pushes / f"{2**22 + 1}-killed" / "files").mkdir(parents=True)  # no process gets this id
    done = pushed(hub, made, "latest:sft", "--push", "me/dev3", "--licence", "mit")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert f"is at {hub.url}/me/dev3" in done.stderr.splitlines()[-1] and "dev3" in done.stderr
    repo = hub.repos["model", "me/dev3"]
    assert repo["private"] is True
    files = repo["branches"]["main"]
    card = files["README.md"].decode()
    assert {name: (made["sft"].path / name).read_bytes() for name in made["sft"].files} == {
        name: content for name, content in files.items() if name != "README.md"
    }
    assert yaml.safe_load(card.split("---\n")[1])["license"] == "mit" and '"me/dev3"' in snippet(card)
    assert str(made["sft"].path.parents[3]) not in card and any("r1flow" in agent for agent in hub.agents)
    assert list(pushes.iterdir()) == []


def test_a_data_set_goes_to_a_branch_of_a_public_one(hub: Hub, made: dict[str, Manifest]) -> None:
    done = pushed(hub, made, "latest:sft_data", "--push", "me/sums", "--revision", "v1", "--public")
    assert done.returncode == 0 and f"is at {hub.url}/datasets/me/sums/tree/v1" in done.stderr, done.stderr
    repo = hub.repos["dataset", "me/sums"]
    assert repo["private"] is False and repo["branches"]["main"] == {}
    assert 'load_dataset("me/sums")' in repo["branches"]["v1"]["README.md"].decode()
    again = pushed(hub, made, "latest:sft_data", "--push", "me/sums", "--revision", "v1")
    assert again.returncode == 0 and repo["private"] is False, again.stderr
    assert len(hub.commits) == 1


def test_an_upload_that_was_refused_continues(hub: Hub, made: dict[str, Manifest]) -> None:
    hub.failing = True
    failed = pushed(hub, made, "latest:sft", "--push", "me/dev3")
    assert (
        failed.returncode == 2 and "the hub refused it (403): Private repository storage limit reached" in failed.stderr
    )
    assert len(failed.stderr.splitlines()) == 1 and hub.commits == []
    assert pushed(hub, made, "latest:sft", "--push", "me/dev3").returncode == 0
    hub.repos["model", "me/dev3"]["branches"]["main"].pop("config.json")
    assert pushed(hub, made, "latest:sft", "--push", "me/dev3").returncode == 0
    assert len(hub.commits) == 2 and hub.commits[1] == ["config.json"]


def test_a_dry_run_lists_what_would_go_and_asks_nobody(made: dict[str, Manifest]) -> None:
    done = export(made, "latest:sft", "--push", "me/dev3", "--dry-run", HF_ENDPOINT="http://127.0.0.1:1")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    sizes = {line[1]: int(line[0].replace(",", "")) for line in lines[:-1]}
    assert {name: file["size"] for name, file in made["sft"].files.items()}.items() <= sizes.items()
    assert "README.md" in sizes and lines[-1][1:] == ["bytes", "in", str(len(sizes)), "files"]
    assert int(lines[-1][0].replace(",", "")) == sum(sizes.values())


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["--push", "me/x"], {}, "no token for"),
        (["--push", "me/x"], {"HF_TOKEN": "hf_wrong" * 4}, "the hub refused it (401): Invalid username or password."),
        (["--push", "you/x"], {"HF_TOKEN": TOKEN}, "(403): You don't have the rights to create a model under the na"),
        (["--push", "me/x y"], {"HF_TOKEN": TOKEN}, "--push me/x y: "),
        (["--push", "x"], {"HF_TOKEN": TOKEN}, "write OWNER/NAME"),
        (["--push", "me/x"], {"HF_TOKEN": TOKEN, "HF_ENDPOINT": "nowhere"}, "no answer from http://127.0.0.1"),
        (["--push", "me/x"], {"HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set; unset it to upload"),
        ([], {}, "give a FOLDER, or --push OWNER/NAME"),
        (["folder", "--push", "me/x"], {}, "give a FOLDER, or --push OWNER/NAME"),
        (["folder", "--public"], {}, "--revision and --public are for --push"),
    ],
)
def test_what_goes_wrong_is_one_line(
    hub: Hub, made: dict[str, Manifest], arguments: list[str], environment: dict[str, str], said: str
) -> None:
    where = {"HF_ENDPOINT": hub.url, **environment}
    if where["HF_ENDPOINT"] == "nowhere":
        where["HF_ENDPOINT"] = f"http://127.0.0.1:{closed_port()}"
    done = export(made, "latest:sft", *arguments, **where)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ") and said in done.stderr, done.stderr
    assert TOKEN not in done.stderr and hub.repos == {}


@pytest.mark.parametrize(
    ("stage", "rows"), [("problems", {"train": 12, "test": 8}), ("sft_data", {"train": 9, "validation": 3})]
)
def test_the_card_of_a_data_set_is_run_as_it_is_pasted(
    made: dict[str, Manifest], tmp_path: Path, stage: str, rows: dict[str, int]
) -> None:
    folder = tmp_path / "data"
    done = export(made, f"latest:{stage}", str(folder), "--licence", "cc0-1.0")
    assert done.returncode == 0, done.stderr
    card = (folder / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["license"] == "cc0-1.0"
    code = f"{snippet(card)}\nimport json; print(json.dumps([data.num_rows, data['train'].column_names]))"
    own = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=own, capture_output=True, text=True, check=True
    )
    counts, columns = json.loads(ran.stdout.splitlines()[-1])
    assert counts == rows
    assert set(columns) >= {"prompt", {"problems": "solution", "sft_data": "completion"}[stage]}  # TRL's names
    assert datasets.load_dataset(str(folder), cache_dir=str(tmp_path / "cache")).num_rows == rows


def test_the_card_of_a_base_model_asks_by_its_plain_template(made: dict[str, Manifest], tmp_path: Path) -> None:
    # The template came after publishing; the export checks every byte of what its manifest names, and no more.
    done = export(made, "latest:base", str(tmp_path / "base"))
    assert done.returncode == 0, done.stderr
    code = snippet((tmp_path / "base" / "README.md").read_text())
    assert "User: {prompt}" in code
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
