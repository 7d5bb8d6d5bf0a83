"""Shards spread over a Ray cluster by Ray Data: the same files as the workers of one job write, placed by Ray.

Each of Ray's actors is a worker as any other: it takes a shard whose journal it gets hold of, and goes on where one
that was killed had stopped. Ray replaces actors whose machine is lost. The shards' folder must be the same everywhere.
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
    """Makes shards, one at a time, in an actor of its own."""

    def make(self, place: P_contra) -> W_co:
        """Returns what is to be told of it."""


def make_on_ray(
    cluster: RayCluster, places: Sequence[P], worker: Callable[[], Maker[P, W]], tell: Callable[[W], object]
) -> None:
    """Each of `places` by one of the workers; `tell` is called in this process, place after place."""
    try:
        import ray
        import ray.data
    except ModuleNotFoundError:
        raise InputError("ray: the package is not installed: pip install 'r1flow[ray]'") from None
    if not places:
        return
    try:
        _answers(cluster.address)
        ray.init(address=cluster.address, log_to_driver=False)
    except OSError as error:  # ConnectionError is one
        raise InputError(f"ray.address: no Ray cluster at {cluster.address!r}: {_first_line(error)}") from None

    class Actor:
        def __init__(self) -> None:
            self.worker = worker()

        def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
            return {"told": pickle.dumps(self.worker.make(places[row["place"]]))}

    numbers = ray.data.from_items([{"place": n} for n in range(len(places))], override_num_blocks=len(places))
    actors = ray.data.ActorPoolStrategy(size=min(cluster.workers, len(places)))
    try:
        for row in numbers.map(Actor, compute=actors, num_cpus=cluster.cpus, num_gpus=cluster.gpus).iter_rows():
            tell(pickle.loads(row["told"]))
    finally:
        ray.shutdown()


def _answers(address: str | None) -> None:
    """Ray itself asks for minutes where nothing answers."""
    if found := re.fullmatch(r"(?:ray://)?([^:/]+):(\d+)", address or ""):
        socket.create_connection((found[1], int(found[2])), timeout=10).close()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
