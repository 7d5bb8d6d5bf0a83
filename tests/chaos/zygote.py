"""Starts commands as forks of a process that has imported what they need, which halves the time of a try.

Only commands whose environment is that of this process: limits, namespaces and preloaded libraries need an exec.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.chaos import processes
from tests.support.r1 import ROOT

RUNS = 256
"""In place of the exit code of a command that has not ended."""


class Zygote:
    """The process that forks."""

    def __init__(self, environment: dict[str, str]):
        self.environment = environment
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.zygote"],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.NOT_OURS.add(self.process.pid)

    def fork(self, arguments: list[str], stderr: str) -> Forked:
        """Start `r1 ARGUMENTS`; its stderr goes to this file."""
        return Forked(self, self._ask({"arguments": arguments, "stderr": stderr}))

    def code(self, pid: int) -> int | None:
        """Exit code of a command, None while it runs. Not to be asked again once it has ended."""
        code = self._ask({"pid": pid})
        return None if code == RUNS else code

    def _ask(self, question: dict[str, object]) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def close(self) -> None:
        """End the process; commands under way go on."""
        self.process.kill()
        self.process.wait()


class Forked:
    """A command, with the part of the interface of subprocess.Popen that tries use."""

    def __init__(self, zygote: Zygote, pid: int):
        self.zygote, self.pid = zygote, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit code, None while it runs."""
        if self.returncode is None:
            self.returncode = self.zygote.code(self.pid)
        return self.returncode


def main() -> None:
    """Import, then answer questions, one a line: fork a command, or tell the exit code of one."""
    from flows.home import prepare_environment

    prepare_environment()
    import mlflow  # noqa: F401

    import flows.cli.main
    import flows.prefect_flows  # noqa: F401
    from flows.cli.__main__ import main as r1

    for line in sys.stdin:
        question = json.loads(line)
        if "pid" not in question:
            pid = os.fork()
            if pid == 0:
                _become(question["stderr"])
                os._exit(_run(r1, question["arguments"]))
            print(pid, flush=True)
            continue
        # Told once and not remembered: the kernel gives the number of a process that was waited for to another.
        found, status = os.waitpid(question["pid"], os.WNOHANG)
        print(os.waitstatus_to_exitcode(status) if found else RUNS, flush=True)


def _become(stderr: str) -> None:
    output = os.open(stderr, os.O_WRONLY | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.dup2(output, 2)


def _run(r1, arguments: list[str]) -> int:  # type: ignore[no-untyped-def]
    sys.argv = ["r1", *arguments]  # as the program itself: `r1` sets what Python does with a signal in a destructor
    try:
        code = r1()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    main()
