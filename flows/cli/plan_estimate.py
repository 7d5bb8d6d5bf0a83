"""`r1 plan --estimate`: turns the command line's assumptions into a table."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from flows.cli.terminal import print_row, print_text
from flows.home import home, store
from flows.progress import duration
from flows.recipe.load import load_recipe
from flows.recipe.schema import Recipe
from flows.run.estimate import FILE, Assumptions, estimate, to_json, with_prompts
from flows.run.proposals import Search
from flows.run.stage_work import architecture_of, base_of
from flows.stage_contract.stage import Step
from grpo.errors import InputError
from tasks.estimate.devices import DEVICES, Device
from tasks.estimate.local_device import calibrate, local_device, processor
from tasks.estimate.misfits import misfits, sentence
from tasks.estimate.stages import Assumed, Estimate


def assumptions_of(args: argparse.Namespace, default: str | None = None) -> Assumptions:
    """The assumptions given on the command line. `default`: the device if none is given; None: this machine's
    device."""
    if args.device is not None and args.device not in DEVICES:
        raise InputError(f"--device {args.device}: give one of {', '.join(DEVICES)}, and --assume for what differs")
    device = calibrate(home()) if args.calibrate else _device(args.device or default)
    assumed = Assumed()
    for pair in args.assume:
        name, _, value = pair.partition("=")
        try:
            change: dict[str, Any] = {name: float(value)}
        except ValueError:
            raise InputError(f"--assume {pair}: write NAME=NUMBER") from None
        if not 0 < change[name] < math.inf:  # nor NaN
            raise InputError(f"--assume {pair}: give a number above 0")
        if name in {of.name for of in fields(Assumed)}:
            assumed = replace(assumed, **change)
        elif name in {of.name for of in fields(Device)} - {"name", "kind"}:
            device = replace(device, **change)
        else:
            known = [of.name for of in (*fields(Assumed), *fields(Device)) if of.name not in ("name", "kind")]
            raise InputError(f"--assume {pair}: unknown; there are {', '.join(known)}")
    return Assumptions(device, assumed, args.config, store().list())


def _device(name: str | None) -> Device:
    if name is None:
        return local_device(home())
    return processor(home()) if name == "cpu" else DEVICES[name]


def make(args: argparse.Namespace, graph: Sequence[Step], recipe: Recipe) -> dict[str, Any]:
    """The estimate of `r1 plan` as plain values.

    Raises:
        InputError: a stage does not fit the device; the message is one line.
    """
    assumptions = assumptions_of(args, recipe.device)
    if not any(pair.startswith("prompt_tokens=") for pair in args.assume):
        assumptions = with_prompts(assumptions, graph, recipe)
    estimates = estimate(graph, recipe, assumptions)
    if too_large := misfits(estimates, assumptions.device):
        raise _refused(too_large, estimates, assumptions, args, graph, recipe)
    return to_json(estimates, assumptions)


def _refused(
    too_large: Sequence[str],
    estimates: Mapping[str, Estimate],
    assumptions: Assumptions,
    args: argparse.Namespace,
    graph: Sequence[Step],
    recipe: Recipe,
) -> InputError:
    """The error about the first stage that does not fit. What the others need is written to stderr, a line each, and
    all that was found to set: more than an error's one line can hold."""
    students = [student.name for student in recipe.distill.students] if recipe.distill else []
    sentences: list[str] = []
    overrides: list[str] = []
    for step in (step for step in graph if step.name in too_large):

        def with_overrides(overrides: list[str], step: Step = step) -> Estimate:
            changed = load_recipe(args.recipe, [*args.overrides, *overrides], args.seed)
            return estimate([step], changed, assumptions)[step.name]

        a = architecture_of(base_of(step.name, recipe), assumptions.config)
        name, device = step.name, assumptions.device
        search = Search(name, step.config(recipe), estimates[name], a, device, with_overrides, students)
        proposal = search.proposal()
        sentences.append(sentence(name, estimates[name], device, proposal.text))
        overrides += proposal.overrides
    first, *others = sentences
    if not others:
        return InputError(first)
    for line in others:
        print(line, file=sys.stderr)
    if overrides:
        print(f"all of them: {' '.join(f'--set {shlex.quote(each)}' for each in overrides)}", file=sys.stderr)
    return InputError(f"{first}. Nor do these fit: {', '.join(too_large[1:])}")


def show(estimated: Mapping[str, Any], running: Sequence[str]) -> None:
    """Prints a table. The last line is the sum over `running`, the stages that would run."""
    device = estimated["device"]
    print()
    print_text(
        f"estimate for {device['name']}, from earlier builds, settings and assumptions ({FILE} of a run has all):"
    )
    sizes = " ".join(f"{name:>8}" for name in ("host GB", "disk GB", "net GB"))
    print_row(f"  {'':<16} {'devices':>7} {'device-h':>9} {'time':>9} {'peak GB':>8} {'':<10} {sizes}  from")
    for name, of in estimated["stages"].items():
        peak = f"{of['peak_memory_gb']:8.2f} {of['peak_phase']:<10}" if "peak_memory_gb" in of else f"{'':8} {'':<10}"
        rest = f"{of['host_gb']:8.2f} {of['disk_gb']:8.2f} {of['network_gb']:8.1f}  {_origin(of)}"
        print_row(
            f"  {name:<16} {of['devices']:>7} {of['device_hours']:9.2f} {duration(of['seconds']):>9} {peak} {rest}"
        )
    hours = sum(estimated["stages"][name]["device_hours"] for name in running)
    seconds = sum(estimated["stages"][name]["seconds"] for name in running)
    print_row(f"  {'to run':<16} {'':>7} {hours:9.2f} {duration(seconds):>9}")


def _origin(of: Mapping[str, Any]) -> str:
    """Where an estimate comes from: "settings", "measured 0123456789ab" or "scaled 0123456789ab", with the artifact."""
    return "settings" if of["source"] == "computed" else f"{of['source']} {of['source_key'][:12]}"
