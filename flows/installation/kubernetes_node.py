"""One pod's part in the Kubernetes job of a flow run: `python -m flows.installation.kubernetes_node COMMAND ...`.

The job is an Indexed one: its pods are called JOB-0, JOB-1, ... and find each other through the headless Service
`SERVICE` ([deployments/README.md](../../deployments/README.md#several-nodes)). A job of one pod only runs the command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from flows.installation import node
from grpo.errors import InputError
from tasks.trainer.rendezvous import ENDPOINT, RANK

PODS, INDEX, POD = "R1FLOW_PODS", "JOB_COMPLETION_INDEX", "HOSTNAME"
SERVICE, PORT = "r1flow", 29500


def rendezvous_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for this pod; empty in a job of one pod.

    Raises:
        InputError: Kubernetes did not number the pods.
    """
    pods, index, pod = (environment.get(name, "") for name in (PODS, INDEX, POD))
    if pods in ("", "1"):
        return {}
    if not index.isdecimal() or not pod.endswith(f"-{index}"):
        raise InputError(
            f"{PODS} is {pods}, but {INDEX} is {index!r} and {POD} {pod!r}: pods are numbered in jobs with "
            "completionMode Indexed, as in the template of `r1 deploy --pools kubernetes`"
        )
    return {ENDPOINT: f"{pod.removesuffix(index)}0.{SERVICE}:{PORT}", RANK: index}


def main(command: Sequence[str]) -> int:
    """Runs this pod's part and returns its exit code, 2 if the input is wrong."""
    try:
        variables = rendezvous_variables(os.environ)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    if not variables:
        os.execvp(command[0], [*command])
    os.environ.update(variables)
    return node.main(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
