"""Checks how a model would run here, before a stage loads it: ``python -m grpo.check_model [--remote-code] MODEL``.

Prints one JSON object: `attention`, "packed" or "plain" (grpo/model/probe.py), and `reason`, what packing gets wrong.
Exits with code 2 and a one-line message if the model can run neither way.
"""

from __future__ import annotations

import json
import sys

from grpo.config.common import Hardware
from grpo.errors import InputError


def main(arguments: list[str]) -> int:
    """Checks the given model folder. Returns the exit code."""
    from transformers.utils import logging

    from grpo.model.loading import attention_of

    logging.disable_progress_bar()
    *flags, model = arguments
    try:
        # The probe always computes in float32; this only halves the memory.
        hardware = Hardware(device="cpu", dtype="bfloat16", remote_code="--remote-code" in flags)
        attention, reason = attention_of(model, hardware)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"attention": attention, "reason": reason}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
