"""Which gates of a recipe apply to a run, and whether each can be read where it stands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flows.stage_contract.stage import Step
from flows.stages import evaluate
from grpo.errors import InputError
from tasks.gates.conditions import Gate


def check_gates(gates: Iterable[Gate], graph: Sequence[Step], approve: Sequence[str]) -> list[Gate]:
    """The gates that apply to a flow: those that read no stage of another flow, and no row that its table lacks.

    Raises:
        InputError: a gate cannot be read at its position, or `approve` names a gate that does not exist or does not
            ask.
    """
    stages = [step.name for step in graph]
    known = evaluate.checkpoints(stages)
    # Distillation makes Dev1 too, but evaluates Dev2 and its students.
    left_out = known.keys() - {name for step in graph if step.name == "evaluate" for name in step.stage.needs}
    here = {gate.name: gate for gate in gates if gate.stages() <= {*stages} and not gate.stages("table") & left_out}
    for name in approve:
        if name not in here:
            raise InputError(f"--approve {name}: no such gate; there are {', '.join(here) or 'none'}")
        if here[name].on_failure != "ask" and here[name].review is None:
            raise InputError(f"--approve {name}: this gate does not ask; set its on_failure to 'ask', or change it")
    for gate in here.values():
        so_far = stages[: stages.index(gate.after) + 1]
        for stage in sorted(gate.stages()):
            if stage not in so_far:
                raise InputError(
                    f"gate {gate.name!r} looks at {stage}, which runs after the gate; compare earlier stages"
                )
        for stage in sorted(gate.stages("evaluation") | gate.stages("table")):
            if stage not in known:
                raise InputError(
                    f"gate {gate.name!r}: {stage} makes no checkpoint to evaluate; these do: {', '.join(known)}"
                )
    return [*here.values()]
