"""Checks how a model would run here, before a stage loads it:
``python -m grpo.check_model MODEL [--remote-code] [--attention auto|packed|plain] [--unfused]``.

Prints one JSON object: `attention`, "packed" or "plain" (grpo/model/probe.py); `reason`, what packing gets wrong; and
`by_transformers`, what transformers' own code does nevertheless. Exits with code 2 and a one-line message if the model
cannot run as asked.
"""

from __future__ import annotations

import argparse
import json
import sys

from grpo.config.common import Hardware
from grpo.errors import InputError
from grpo.processes.loading import never_collected


def main(arguments: list[str]) -> int:
    """Checks the given model folder. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m grpo.check_model")
    parser.add_argument("model")
    parser.add_argument("--remote-code", action="store_true")
    parser.add_argument("--attention", choices=("auto", "packed", "plain"), default="auto")
    parser.add_argument("--unfused", action="store_true")
    args = parser.parse_args(arguments)

    with never_collected():
        from transformers.utils import logging

        from grpo.model.loading import way_of

    logging.disable_progress_bar()
    ways = dict(remote_code=args.remote_code, attention=args.attention, fused=not args.unfused)
    try:
        # The probe always computes in float32; this only halves the memory.
        way = way_of(args.model, Hardware(device="cpu", dtype="bfloat16", **ways))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    attention = "packed" if way.packed else "plain"
    print(json.dumps({"attention": attention, "reason": way.problem, "by_transformers": way.by_transformers}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
