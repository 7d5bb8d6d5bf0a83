"""Process control for flows: lifetime of child processes, a worker pool, the file with a trainer's peak memory, and
detection of full disks and of memory that is exhausted or too little."""

from grpo.processes.exhausted import (
    LEAST_BYTES,
    OUT_OF_MEMORY,
    RUN_BYTES,
    check_limit,
    is_full,
    says_full,
    says_out_of_memory,
)
from grpo.processes.lifetime import adopt_orphans, descendants, die_with_parent, end_descendants, process_name
from grpo.processes.loading import never_collected
from grpo.processes.peak_memory import FILE as PEAK_MEMORY_FILE
from grpo.processes.pool import Pool
from grpo.processes.worker_handle import Failure

__all__ = [
    "LEAST_BYTES",
    "OUT_OF_MEMORY",
    "PEAK_MEMORY_FILE",
    "RUN_BYTES",
    "Failure",
    "Pool",
    "adopt_orphans",
    "check_limit",
    "descendants",
    "die_with_parent",
    "end_descendants",
    "is_full",
    "never_collected",
    "process_name",
    "says_full",
    "says_out_of_memory",
]
