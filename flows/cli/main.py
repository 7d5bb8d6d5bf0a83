"""The command r1; `r1 --help` lists its subcommands."""

from __future__ import annotations

import argparse
import errno
import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from flows.cli import (
    artifacts,
    chat,
    compare,
    completion,
    data,
    deploy,
    env,
    eval,
    export,
    plan,
    promote,
    prune,
    recipes,
    report,
    run,
    runs,
    serve,
    ui,
    up,
    verify,
    why,
)
from flows.home import home, prepare_environment
from grpo.errors import InputError
from grpo.secret_values import masked

MODULES = [recipes, run, plan, runs, artifacts, why, data, compare, report, eval, chat, serve]
MODULES += [promote, export, verify, prune, ui, deploy, up, env, completion]
"""In the order of `r1 --help`. Each module adds its subcommands."""

COMMANDS = {
    "recipes": recipes.recipes,
    "init": recipes.init,
    "run": run.run,
    "plan": plan.run,
    "runs": runs.run,
    "stages": artifacts.stages,
    "show": artifacts.show,
    "why": why.run,
    "data": data.run,
    "compare": compare.run,
    "report": report.run,
    "eval": eval.run,
    "chat": chat.run,
    "serve": serve.run,
    "promote": promote.run,
    "export": export.run,
    "verify": verify.run,
    "prune": prune.run,
    "ui": ui.run,
    "deploy": deploy.run,
    "up": up.run,
    "down": up.down,
    "env": env.run,
    "completion": completion.run,
}

_OF_THE_DISK = {errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT}
"""Errors that are not our fault: a path that cannot be read or written, or a full disk."""


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        """Prints the version. Computed only on request, because it reads metadata and runs git."""
        print(f"r1flow {env.own_version()}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Prints one line, as for any other bad input, instead of the usage."""
        self.exit(2, f"error: {message}; see `{self.prog} --help`\n")


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = _Parser(prog="r1", description="The DeepSeek-R1 recipe: run, plan, look, talk.")
    top.add_argument("--version", action=_Version, nargs=0, help="print the version and the commit")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in MODULES:
        module.add(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 0 done, 1 failed, 2 bad input."""
    arguments = sys.argv[1:] if arguments is None else arguments
    top = parser()
    completion.complete(top)
    args = top.parse_args(arguments, argparse.Namespace(arguments=arguments))
    from tasks.trainer.processes import LEAST_BYTES, RUN_BYTES, check_limit, is_full

    try:
        check_limit(RUN_BYTES if args.command == "run" else LEAST_BYTES)
        prepare_environment()
        code = COMMANDS[args.command](args)
        sys.stdout.flush()  # here, where a closed pipe is noticed
        return code
    except InputError as error:
        print(f"error: {masked(str(error))}", file=sys.stderr)
        return 2
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 128 + signal.SIGPIPE
        if error.errno not in _OF_THE_DISK:
            return _unexpected(error)
        _drop_what_cannot_be_printed()
        place = error.filename or (home() if is_full(home()) else "the output, or a file that was being written")
        print(f"error: {place}: {error.strerror}", file=sys.stderr)
        return 2
    except Exception as error:
        return _unexpected(error)
    except KeyboardInterrupt:
        print("stopped; the same command continues from the last checkpoint", file=sys.stderr)
        return 130


def _nobody_reads() -> bool:
    """Whether the reader of our output has ended, as `r1 runs | head` does. Then Python is kept from writing the rest
    when it exits, which would print an error."""
    output = select.poll()
    output.register(1, 0)
    if not output.poll(0):  # of a pipe without a reader it says POLLERR
        return False
    _drop_output()
    return True


def _drop_what_cannot_be_printed() -> None:
    """Keeps Python from writing output to a full disk again when it exits, which would change the exit code."""
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _unexpected(error: Exception) -> int:
    """Prints one line for an unexpected error, usually from a library. The traceback goes to a file."""
    from tasks.trainer.processes import OUT_OF_MEMORY, is_full, says_full, says_out_of_memory

    if says_out_of_memory(error):
        print(f"error: {OUT_OF_MEMORY}", file=sys.stderr)
        return 2
    if says_full(error) or is_full(home()):
        print(f"error: no space left on {home()}: free some or move the home folder with R1FLOW_HOME", file=sys.stderr)
        return 2
    said = masked(" ".join(str(error).split()))[:300]
    place = home() / "logs" / "errors.log"
    try:
        place.parent.mkdir(exist_ok=True)
        with place.open("a", encoding="utf-8") as file:
            file.write(masked("".join(traceback.format_exception(error))) + "\n")
    except OSError:
        raise error from None
    print(f"failed: {type(error).__name__}: {said}; the traceback is in {place}", file=sys.stderr)
    return 1
