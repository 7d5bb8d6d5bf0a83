"""This machine's GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess


def gpus() -> list[str]:
    """This machine's GPUs, named as in CUDA_VISIBLE_DEVICES."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [name for name in allowed.split(",") if name.strip() not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    listing = subprocess.run(
        ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True
    )
    return listing.stdout.split() if listing.returncode == 0 else []
