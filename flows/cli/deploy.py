"""`r1 deploy`: registers pools, queues, deployments, schedules and automations, after showing what would change."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flows.cli.terminal import print_row, print_text
from flows.home import home, read_state
from flows.prefect_server import check_server
from grpo.errors import InputError
from grpo.secret_values import masked

if TYPE_CHECKING:
    from flows.installation.reconcile import ResourceDiff

SHOWN = 8
WIDTH = 60


def add(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("deploy", help="register pools, deployments, schedules, automations with Prefect")
    command.add_argument(
        "--pools",
        metavar="TYPE",
        default="process",
        help="where runs run: process (default), docker, kubernetes, slurm, or another file of deployments/pools",
    )
    command.add_argument(
        "--recipe", default="tiny", help="what the forms of single stages are filled with (default: tiny)"
    )
    command.add_argument(
        "--notify", metavar="TYPE/NAME", help="block to notify through, for example slack-webhook/team"
    )
    command.add_argument("--gpus", type=int, metavar="N", help="GPUs that runs share: the concurrency limit r1-gpus")
    command.add_argument(
        "--credential",
        action="append",
        default=[],
        metavar="NAME=TYPE/BLOCK[.FIELD]",
        help="environment variable of all runs from a block, for example HF_TOKEN=secret/hf-token (repeatable)",
    )
    command.add_argument("--yes", action="store_true", help="apply without asking")
    # For `r1 up`: what people have changed on its server stays.
    command.add_argument("--keep-changes", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Registers what differs. Returns the exit code: 0 if everything is registered, 1 if something differs and nobody
    confirmed the change."""
    if args.gpus is not None and args.gpus < 1:
        raise InputError(f"--gpus {args.gpus}: give 1 or more")
    return asyncio.run(_deploy(args))


async def _deploy(args: argparse.Namespace) -> int:
    from prefect.settings import PREFECT_API_URL

    url = check_server(PREFECT_API_URL.value())

    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError

    from flows.installation.reconcile import apply, compare
    from flows.installation.registered import keep_changes, read_registered, write_registered
    from flows.installation.resources import desired

    async with get_client() as client:
        try:
            last = await read_registered(client, home())
            recipe, gpus = args.recipe, args.gpus
            if args.keep_changes:
                recipe, gpus = recipe if last.is_of_a_file else last.recipe or recipe, last.gpus or gpus
            block = await _block(client, "--notify", args.notify) if args.notify else None
            credentials = dict([await _credential(client, text) for text in args.credential])
            wanted = desired(args.pools, recipe, block, gpus=gpus, credentials=credentials)
            diffs = await compare(client, wanted)
            if args.keep_changes:
                diffs = [keep_changes(diff, last) for diff in diffs]
            _show(url, diffs)
            unchanged = all(diff.status == "unchanged" for diff in diffs)
            if not (unchanged or args.yes or _agreed()):
                print("nothing was changed; --yes applies it", file=sys.stderr)
                return 1
            await apply(client, diffs)
            if read_state(home()).get("prefect") == url:  # the server of `r1 up` or `r1 ui`
                if not args.keep_changes:
                    last = last.model_copy(update={"recipe": recipe, "gpus": gpus or last.gpus})
                await write_registered(client, home(), last, wanted)
        except PrefectHTTPStatusError as error:
            raise InputError(f"{url}: {_detail(error)}") from None
    print("nothing to change" if unchanged else "done")
    return 0


async def _block(client: Any, option: str, name: str) -> str:
    from prefect.exceptions import ObjectNotFound

    kind, slash, document = name.partition("/")
    if not slash:
        raise InputError(f"{option} {name}: write TYPE/NAME, for example slack-webhook/team")
    try:
        return str((await client.read_block_document_by_name(document, kind)).id)
    except ObjectNotFound:
        raise InputError(f"{option} {name}: the server has no such block; make it in the UI under Blocks") from None


async def _credential(client: Any, text: str) -> tuple[str, str]:
    """Variable and template of a --credential. A worker reads the block when it starts a run; nothing else reads it."""
    variable, equals, place = text.partition("=")
    kind, slash, rest = place.partition("/")
    if not (equals and slash and re.fullmatch(r"[A-Za-z_]\w*", variable)):
        raise InputError("--credential: write NAME=TYPE/BLOCK, for example HF_TOKEN=secret/hf-token")
    await _block(client, "--credential", f"{kind}/{rest.partition('.')[0]}")
    return variable, f"{{{{ prefect.blocks.{kind}.{rest} }}}}"


def _show(url: str, diffs: Sequence[ResourceDiff]) -> None:
    print_row(f"Prefect at {masked(url)}")
    for diff in diffs:
        if diff.status == "unchanged":
            continue
        print_row(f"  {diff.status:<7} {diff.resource.kind:<11} {diff.resource.name}")
        changes = diff.changes
        for field, old, new in changes[:SHOWN]:
            print_row(f"            {field}: {_short(old)} -> {_short(new)}")
        if len(changes) > SHOWN:
            print_row(f"            and {len(changes) - SHOWN} more")
    counts = {status: sum(d.status == status for d in diffs) for status in ("create", "change", "delete", "unchanged")}
    print_text(", ".join(f"{count} {status}" for status, count in counts.items() if count or status != "delete"))


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def _agreed() -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        return False
    return input("Apply? [y/N] ").strip().lower() in ("y", "yes")


def _detail(error: Any) -> str:
    """The server's error message, on one line."""
    try:
        detail = error.response.json().get("detail") or error.response.json()
    except ValueError:
        detail = error.response.text
    return f"the server answered {error.response.status_code}: {' '.join(str(detail).split())[:400]}"
