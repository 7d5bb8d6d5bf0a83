"""Memory that a process has freed: kept for itself, or given back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MEASURE = """
import resource
from grpo.processes import malloc

def faults(megabytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [bytearray(2**20) for _ in range(megabytes)]  # tensors too, where torch has no allocator of its own
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20

print({before})
faults(200)
first = resident()
again = faults(200)
malloc.trim()
print(again, first, resident())
"""


def measured(before, **variables):
    code = MEASURE.replace("{before}", before)
    environment = os.environ | variables
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return [float(word) for word in ran.stdout.splitlines()[-1].split()]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_what_was_freed_comes_again_without_the_kernel():
    again, kept, left = measured("malloc.keep_freed_memory()")
    assert again < 10_000  # of 51,200 pages of 4 kB
    assert left < kept - 150  # the 200 MB


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_without_that_it_comes_page_by_page():
    again, *_ = measured("None")
    assert again > 30_000


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_the_environments_own_setting_counts():
    again, *_ = measured("malloc.keep_freed_memory()", MALLOC_MMAP_THRESHOLD_="65536")
    assert again > 200 * 2**20 / 4096 / 2  # each of 200 blocks of 1 MB comes from the kernel again
