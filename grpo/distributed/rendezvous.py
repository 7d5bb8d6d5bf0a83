"""Where the machines of a job meet: torchrun's PET_ variables."""

from __future__ import annotations

import os
import re

from grpo.errors import InputError

ENDPOINT, RANK, ID = "PET_RDZV_ENDPOINT", "PET_NODE_RANK", "PET_RDZV_ID"


def meeting_place(nodes: int) -> tuple[str, int]:
    """Host and port of the first machine. Raises InputError if the variable for it is missing or malformed."""
    place = re.fullmatch(r"(.+):(\d+)", os.environ.get(ENDPOINT, ""))
    if place is None:
        raise InputError(
            f"hardware.nodes is {nodes}, but nothing says where the machines meet: set {ENDPOINT} to HOST:PORT of the "
            "first one, the same on all"
        )
    return place[1], int(place[2])
