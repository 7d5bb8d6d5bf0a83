"""The command that starts vLLM as a server for a trainer.

python -m grpo.generation.vllm.server MODEL [vLLM's own options, such as --port 8000 --tensor-parallel-size 2]

starts vLLM's OpenAI-compatible server so that it accepts weights from a trainer. Anyone who reaches its port can send
weights, so it listens only on this machine unless --host says otherwise.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo.generation.vllm.request import LOGPROBS, chunked_prefill
from grpo.generation.vllm.weight_transfer import BACKEND


def server_command(model: str, options: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Command and environment variables that start a server in this Python environment. `options` are vLLM's."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1"]
    command += ["--logprobs-mode", LOGPROBS, "--generation-config", "vllm", "--enable-scale-out"]
    command += ["--worker-extension-cls", "grpo.generation.vllm.worker.Extension"]
    command += ["--weight-transfer-config", json.dumps({"backend": BACKEND})]
    paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "VLLM_SERVER_DEV_MODE": "1"}
    return [*command, *options], os.environ | variables


def main(arguments: list[str]) -> int:
    """Replaces this process with a vLLM server that accepts the trainer's weights."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo.generation.vllm.server", description="Start vLLM for a trainer."
    )
    parser.add_argument("model", help="Hugging Face folder or hub name; its weights are replaced by the trainer's")
    known, options = parser.parse_known_args(arguments)
    if importlib.util.find_spec("vllm") is None:
        print("error: vllm is not installed here; pip install vllm", file=sys.stderr)
        return 2
    if not chunked_prefill():
        options = ["--no-enable-chunked-prefill", *options]
    command, variables = server_command(known.model, options)
    os.execve(command[0], command, variables)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
