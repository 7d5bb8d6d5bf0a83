"""GPUs as slots of a Prefect global concurrency limit: a job waits until as many slots are free as it needs.

Workers already run one stage per GPU. The limit accounts for what they cannot see: recipes in terminals, other pools,
and other machines' workers that use the same GPUs. If the server has no such limit, nothing waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound

from flows.home import GPU_LIMIT
from flows.prefect_server import keeps_runs
from flows.progress import Progress
from grpo.config.common import Hardware
from grpo.errors import InputError
from tasks.trainer.gpus import gpus

LEASE_S = 60.0
"""Seconds after which the slots of a killed process become free again."""


@contextlib.contextmanager
def gpu_slots(hardware: Hardware) -> Iterator[None]:
    """Holds one slot for each GPU that a job needs, after waiting until they are free.

    Raises:
        InputError: the job needs more slots than the limit has, and would wait forever.
    """
    limit = _limit() if keeps_runs() and hardware.device != "cpu" and gpus() else None
    if limit is None:
        yield
        return
    wanted = hardware.processes * hardware.nodes
    if wanted > limit:
        raise InputError(
            f"hardware: {wanted} processes take a GPU each, but the server's limit {GPU_LIMIT} has {limit}; lower "
            f"hardware.processes, or raise the limit: prefect gcl update {GPU_LIMIT} --limit {wanted}"
        )
    Progress.current().tell(f"asking for {wanted} of the {limit} slots of {GPU_LIMIT}")
    # An unavailable server must not end a training that is running.
    with concurrency(GPU_LIMIT, occupy=wanted, lease_duration=LEASE_S, raise_on_lease_renewal_failure=False):
        yield


def _limit() -> int | None:
    """Number of slots of the limit; None if the server has none, or if it is inactive."""
    with get_client(sync_client=True) as client:
        try:
            found = client.read_global_concurrency_limit_by_name(GPU_LIMIT)
        except ObjectNotFound:
            return None
    return found.limit if found.active else None
