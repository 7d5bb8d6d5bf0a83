"""Runs verl's RL trainer on the machines of a job.
`python -m grpo.trainers.verl.plugins.ray_driver ADDRESS MACHINES [override ...]`."""

from __future__ import annotations

import sys
import time

import ray
from verl.trainer.main_ppo import main


def wait_for_machines(address: str, count: int) -> None:
    """Waits until so many machines are in the cluster: verl does not wait for them."""
    ray.init(address=address, log_to_driver=False)
    while sum(node["Alive"] for node in ray.nodes()) < count:
        time.sleep(1)
    ray.shutdown()


if __name__ == "__main__":
    address, machines = sys.argv.pop(1), int(sys.argv.pop(1))
    if machines > 1:
        wait_for_machines(address, machines)
    main()
