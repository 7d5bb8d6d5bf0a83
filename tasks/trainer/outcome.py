"""The outcome of a trainer: its result, accepted only with proof, or the reason why it failed."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

from grpo.errors import InputError
from grpo.processes.exhausted import OUT_OF_MEMORY, is_full, text_says_full
from grpo.processes.loading import CANNOT_LOAD
from grpo.secret_values import masked

_LOG_TAIL = 65_536  # bytes
_PROGRESS_BAR = re.compile(r"\d%\|.*\|")
"""tqdm's progress bars, which transformers draws. They say nothing about how a trainer ended."""


class StageFailed(RuntimeError):
    """A stage did not do its work. The message says how it ended and where its log is. Secrets in it are masked."""

    def __init__(self, message: str):
        super().__init__(masked(message))


def read_result(code: int, processes: int, result_path: Path, log_path: Path, log_start: int) -> dict[str, Any]:
    """The trainer's result.json. An exit code of 0 alone is not accepted as proof. Raises InputError or StageFailed
    with the reason."""
    if code != 0:
        raise failure(code, processes, log_path, log_start)
    try:
        result: dict[str, Any] = json.loads(result_path.read_text(encoding="utf-8"))
        completed, planned = int(result["steps_completed"]), int(result["steps_planned"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = (
            "without writing result.json"
            if isinstance(error, FileNotFoundError)
            else f"with a bad result.json ({error!r})"
        )
        raise StageFailed(f"the trainer exited with 0 but {reason}; log: {log_path}") from None
    if completed < planned:
        raise StageFailed(f"the trainer exited with 0 after {completed} of {planned} planned steps; log: {log_path}")
    return result


def failure(code: int, processes: int, log_path: Path, log_start: int) -> Exception:
    """The exception for a trainer that exited with `code`, with a message from this machine's log.

    `processes` is the total over all machines; the log is read from byte `log_start`.
    """
    text, who = _log_text(log_path, log_start), "the trainer"
    last = text.rstrip().rpartition("\n")[2]
    if processes > 1 and not last.startswith("error: "):  # such a line is torchrun's own, not a worker's
        # torchrun always exits with 1, reports the first failure last, and hides the worker's own message. That message
        # comes before torchrun's first line, and torch prefixes the lines of a worker's traceback with its rank.
        rank = "0"
        if causes := re.findall(r"^\s*rank\s*: (\d+) \(.*\n\s*exitcode\s*: (-?\d+) \(pid", text, re.MULTILINE):
            rank, code = causes[-1][0], int(causes[-1][1])
            who = f"process {rank} of {processes} of the trainer"
        text = re.split(r"^.*torch/distributed/elastic/multiprocessing/api", text, maxsplit=1, flags=re.MULTILINE)[0]
        culprit = re.findall(rf"^\[rank{rank}\]: ?(.*)", text, re.MULTILINE)
        others = re.sub(r"^\[rank\d+\]:.*", "", text, flags=re.MULTILINE)
        text = "\n".join([others, *culprit])  # other processes may have logged after the failure
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line) and not _PROGRESS_BAR.search(line)]
    if code == 2 and (errors := [line for line in lines if line.startswith("error: ")]):
        return InputError(errors[-1].removeprefix("error: "))
    last = lines[-1] if lines else ""
    # A full disk also loses the last lines of the log.
    if text_says_full(last) or (code > 0 and is_full(log_path.parent)):
        return InputError(f"no space left on {log_path.parent}: free some or move the home folder with R1FLOW_HOME")
    if code == -CANNOT_LOAD:
        return StageFailed(f"{who} could not load its libraries; {OUT_OF_MEMORY}")
    if code == -signal.SIGKILL:
        ended = "was killed by SIGKILL (by the kernel if memory ran out)"
    elif code < 0:
        ended = f"was killed by {signal.Signals(-code).name}"
    else:
        ended = f"exited with {code}"
    return StageFailed(f"{who} {ended}: {last or 'it logged nothing'}; log: {log_path}")


def _log_text(path: Path, start: int) -> str:
    """The last 64 KB of what this attempt logged."""
    with path.open("rb") as file:
        file.seek(max(start, os.fstat(file.fileno()).st_size - _LOG_TAIL))
        return file.read().decode(errors="replace")
