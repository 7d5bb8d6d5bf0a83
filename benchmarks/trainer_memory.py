"""A trainer in a process of its own, and the most memory that it held: python benchmarks/trainer_memory.py [JOB.json]

Runs the job as `python -m grpo.train` does; without one it only imports what a trainer needs. The last line is the
largest resident set of the process, MB (VmHWM). The kernel's other count, ru_maxrss, is no measure of a child: it
begins at what its parent held. Linux only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from measure import high_water_mb

ROOT = Path(__file__).parents[1]


def trainer_mb(job: Path | None = None) -> float:
    """Starts the process and returns its largest resident set, MB.

    Raises:
        subprocess.CalledProcessError: the job failed; its errors are on stderr.
    """
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT), str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TQDM_DISABLE": "1"}
    command = [sys.executable, __file__, *([str(job)] if job else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return float(done.stdout.split()[-1])


def main(arguments: list[str]) -> int:
    from grpo.train import main as train

    code = 0
    if arguments:
        code = train(arguments)
    else:
        import transformers  # noqa: F401

        import grpo.rl.trainer  # noqa: F401
    print(high_water_mb(), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
