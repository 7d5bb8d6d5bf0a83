"""Forms take no secret: the schema by which a Prefect server checks a run's parameters before it creates the run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import ValidationError, validate

from flows.installation.reconcile import apply, compare
from flows.installation.resources import desired
from flows.recipe.form_secrets import WithoutSecrets
from flows.recipe.forms import Overrides
from tests.support.prefect_server import Server


def parameters(
    config: Annotated[Any, WithoutSecrets()] = None,
    overrides: Annotated[Overrides, WithoutSecrets()] = None,
    path: Annotated[str, WithoutSecrets()] = "",
) -> None: ...


FORM = parameter_schema(parameters).model_dump(exclude_unset=True)
PLANT = "planted-in-a-form"
SECRETS: list[tuple[dict[str, Any], str]] = [
    ({"config": {"judge": {"request": {"api_key": PLANT}}}}, "config.judge.request.api_key"),
    ({"config": {"judge": {"request": {"extra": [{"headers": {"X-Api-Key": 7}}]}}}}, "X-Api-Key"),
    ({"config": {"judge": {"request": {"headers": {"Cookie": [PLANT]}}}}}, "Cookie"),
    ({"config": {"judge": {"request": {"user": f"Bearer {PLANT}-0"}}}}, "user"),
    ({"config": {"judge": {"base_url": f"https://me:{PLANT}@host/v1"}}}, "base_url"),
    ({"config": {"engine": {"url": f"https://host/?api_key={PLANT}"}}}, "url"),
    ({"config": {"judge": {"api_key_env": f"{PLANT}-and-long-enough"}}}, "api_key_env"),
    ({"config": {f"hf_{'aB' * 17}": 1}}, "config"),
    ({"overrides": ["sft.epochs=1", f"sft_data.judge.request.api_key={PLANT}"]}, "overrides[1]"),
    ({"overrides": [f"sft_data.judge.request={{headers={{Authorization='{PLANT}'}}}}"]}, "overrides[0]"),
    ({"overrides": [f"sft_data.judge.request.token = '{PLANT}'"]}, "overrides[0]"),
    ({"overrides": [f"sft_data.judge.base_url=https://me:{PLANT}@host"]}, "overrides[0]"),
    ({"path": f"https://{PLANT}@host"}, "path"),
]
OTHERS: list[dict[str, Any]] = [
    {"config": {"judge": {"base_url": "http://node7:8000/v1", "api_key_env": "JUDGE_KEY", "max_tokens": 1024}}},
    {"config": {"judge": {"request": {"response_format": {"type": "json_object"}, "seed": None}}}},
    {"config": {"options": {"eos_token": "</s>", "password": "", "token": None, "use_auth": True, "key": "question"}}},
    {"overrides": ["reasoning_rl.kl_coef=0.01", 'sft_data.judge.api_key_env="JUDGE_KEY"', "sft.max_tokens=256"]},
    {"overrides": ['sft_data.judge={kind="openai",base_url="http://h:1/v1",model="m"}', "base.eos_token='</s>'"]},
    {"config": [1.5, None, {"a": [[]]}], "path": "/data/a@b/model"},
]


@pytest.mark.parametrize(("parameters", "where"), SECRETS)
def test_a_form_refuses_a_secret_and_says_where_and_what_to_do(parameters: dict[str, Any], where: str) -> None:
    with pytest.raises(ValidationError) as refused:
        validate(parameters, FORM, raise_on_error=True)
    said = str(refused.value)
    assert where in said and "put it into an environment variable" in said, said
    assert "(?" not in said  # the pattern itself


@pytest.mark.parametrize("parameters", OTHERS)
def test_a_form_takes_other_settings(parameters: dict[str, Any]) -> None:
    validate(parameters, FORM, raise_on_error=True)


async def registered(url: str) -> None:
    """Registers a stage and a recipe as `r1 deploy` does."""
    names = ("r1-", "sft_data/", "train-r1/")
    wanted = [resource for resource in desired("process") if resource.name.startswith(names)]
    with temporary_settings({PREFECT_API_URL: url}):
        async with get_client() as client:
            await apply(client, await compare(client, wanted))


@pytest.mark.system
def test_a_server_creates_no_run_with_a_secret_and_stores_none(tmp_path: Path) -> None:
    """By the requests that the form sends: one that checks the values, and one that creates the run."""
    server = Server(tmp_path / "prefect")
    server.folder.mkdir()
    server.start()
    try:
        asyncio.run(registered(server.url))
        judge = {"kind": "openai", "base_url": "http://h/v1", "model": "m"}
        forms = [
            ("sft_data", "sft_data", {"config": {"judge": judge | {"request": {"api_key": PLANT}}}}),
            ("sft_data", "sft_data", {"config": {"judge": judge | {"request": {"headers": {"Cookie": PLANT}}}}}),
            ("train-r1", "train-r1", {"overrides": [f"sft_data.judge.request.api_key={PLANT}"]}),
            ("train-r1", "train-r1", {"recipe_file": f"https://me:{PLANT}@host/x.toml"}),
        ]
        for flow, name, parameters in forms:
            deployment = server.ask("GET", f"/deployments/name/{flow}/{name}")
            schema, path = deployment["parameter_openapi_schema"], f"/deployments/{deployment['id']}/create_flow_run"
            checked = server.ask("POST", "/ui/schemas/validate", schema=schema, values=parameters)
            assert not checked["valid"] and "put it into an environment variable" in str(checked["errors"])
            refused = httpx.post(server.url + path, json={"parameters": parameters}, timeout=60)
            assert refused.status_code == 409, refused.text
        unknown = httpx.post(server.url + path, json={"parameters": {"api_key": PLANT}}, timeout=60)
        assert unknown.status_code == 409 and "('api_key' was unexpected)" in unknown.text
        assert server.ask("POST", "/flow_runs/filter") == []
        accepted = {"overrides": ["sft_data.judge.request.max_tokens=5"]}
        assert server.ask("POST", path, parameters=accepted)["parameters"]["overrides"] == accepted["overrides"]
    finally:
        server.stop()
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert any(file.suffix == ".db" for file in files)
    assert [file for file in files if PLANT.encode() in file.read_bytes()] == []
