"""Sampling shards on a Ray cluster with Ray Data. Writes the same files as the workers of one job.

Each Ray actor is a worker like any other: it takes a shard whose journal it can lock, and continues where a killed
worker stopped. Ray replaces actors whose machine is lost. All machines must see the same folder of shards.
"""

from __future__ import annotations

import pickle
import re
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from grpo.config.common import RayCluster
from grpo.errors import InputError

P = TypeVar("P")
W = TypeVar("W")
P_contra = TypeVar("P_contra", contravariant=True)
W_co = TypeVar("W_co", covariant=True)


class Maker(Protocol[P_contra, W_co]):
    """Samples shards, one at a time, in an actor."""

    def make(self, place: P_contra) -> W_co:
        """Samples one shard. Returns its counts."""


def make_on_ray(
    cluster: RayCluster,
    gpus: float,
    places: Sequence[P],
    worker: Callable[[], Maker[P, W]],
    tell: Callable[[W], object],
) -> None:
    """Samples each of `places` on one of the workers, which have `gpus` each. Calls `tell` in this process after each
    one."""
    try:
        import ray
        import ray.data
    except ModuleNotFoundError:
        raise InputError("ray: the package is not installed: pip install 'r1flow[ray]'") from None
    if not places:
        return
    try:
        _answers(cluster.address)
        # None would be the cluster that was last started on this machine, even if it is gone.
        ray.init(address=cluster.address or "local", log_to_driver=False)
    except OSError as error:  # ConnectionError is an OSError
        raise InputError(f"ray.address: no Ray cluster at {cluster.address!r}: {_first_line(error)}") from None

    class Actor:
        def __init__(self) -> None:
            self.worker = worker()

        def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
            return {"told": pickle.dumps(self.worker.make(places[row["place"]]))}

    numbers = ray.data.from_items([{"place": n} for n in range(len(places))], override_num_blocks=len(places))
    actors = ray.data.ActorPoolStrategy(size=min(cluster.workers, len(places)))
    try:
        for row in numbers.map(Actor, compute=actors, num_cpus=cluster.cpus, num_gpus=gpus).iter_rows():
            tell(pickle.loads(row["told"]))
    finally:
        ray.shutdown()


def _answers(address: str | None) -> None:
    """Raises an exception if nothing answers at `address`; Ray itself would retry for minutes."""
    if match := re.fullmatch(r"(?:ray://)?([^:/]+):(\d+)", address or ""):
        socket.create_connection((match[1], int(match[2])), timeout=10).close()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
