"""One machine's part in a job on several machines: `python -m flows.installation.node COMMAND ...`.

The first machine (PET_NODE_RANK=0) runs the command, which executes the flow run, and leads the rendezvous until it
ends. Every other machine takes part in the trainers that the flow run starts, and leaves with the first one.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

from flows.home import home
from grpo.errors import InputError
from tasks.trainer.node import run_node
from tasks.trainer.rendezvous import ENDPOINT, Rendezvous


def main(command: Sequence[str]) -> int:
    """Runs this machine's part and returns its exit code, 2 if the input is wrong."""
    try:
        rendezvous = Rendezvous.of_environment(home())
        if rendezvous is None:
            raise InputError(f"{ENDPOINT} is not set; it is HOST:PORT of the first machine")
        if rendezvous.rank:
            return run_node(rendezvous)
        with rendezvous.lead():
            return _run(command)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


def _run(command: Sequence[str]) -> int:
    """Runs a command, passes SIGTERM on to it, and returns its exit code as a shell does."""
    process = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
    code = process.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
