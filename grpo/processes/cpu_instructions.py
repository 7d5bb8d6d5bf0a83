"""Restricts the CPU instructions of trainers, so that a trained model is bit-identical on every x86 CPU with AVX2.

MKL, PyTorch and Numba use the widest vectors that a CPU has, and MKL may split a sum among threads. Both change the
order of sums, and so the last bits of a model. A trainer in float32 is therefore limited to AVX2 and to sums whose
order does not depend on the number of threads. On a GPU this has no effect; on a CPU with AVX-512 a large model trains
slower.

A trainer in bfloat16 is not restricted, because AVX2 has no instructions for it. On a CPU with AMX PyTorch's attention
would fail ("pack_vnni2 is only supported when avx512 is supported"), or, with oneDNN held to AVX2 as well, products
would be hundreds of times slower.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from grpo.errors import InputError

VARIABLE = "R1FLOW_CPU_INSTRUCTIONS"
"""`portable` (the default), or `native`: all instructions of the CPU. Arithmetic in bfloat16 is always native."""
PORTABLE = {
    "MKL_CBWR": "AVX2,STRICT",  # conditional numerical reproducibility for any number of threads
    "ATEN_CPU_CAPABILITY": "avx2",
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx2,+fma",
}


def instruction_variables(environment: Mapping[str, str], dtype: str) -> dict[str, str]:
    """Variables to add to the environment of a trainer whose arithmetic has this type. Variables that the user has set
    are not changed.

    Raises InputError if R1FLOW_CPU_INSTRUCTIONS is neither `portable` nor `native`.
    """
    choice = environment.get(VARIABLE, "portable")
    if choice not in ("portable", "native"):
        raise InputError(f"{VARIABLE} is {choice!r}; it must be 'portable' or 'native'")
    if choice == "native" or dtype != "float32" or not _has_avx2():
        return {}
    return {name: value for name, value in PORTABLE.items() if name not in environment}


def sums_ignore_threads() -> bool:
    """Whether this process was started so that results do not depend on the number of threads."""
    return all(os.environ.get(name) == value for name, value in PORTABLE.items())


@functools.cache
def _has_avx2() -> bool:
    if platform.machine() != "x86_64" or os.name != "posix":
        return False
    try:
        described = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return False
    flags = next((line.split() for line in described.splitlines() if line.startswith("flags")), [])
    return {"avx2", "fma"} <= {*flags}
