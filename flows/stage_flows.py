"""The Prefect flow of each stage. A flow has the stage's name and, as parameters, the fields of its form.

What a stage does is in its own module in flows/stages/, which knows nothing of Prefect's flows.
"""

from __future__ import annotations

from typing import Any

from prefect import Flow
from prefect.states import State

from flows.recipe.data_sections import ColdStartData, SFTData
from flows.recipe.evaluation import Evaluate
from flows.recipe.forms import (
    AlignmentRound,
    EvaluatedStages,
    ForGate,
    Inputs,
    ReplayShare,
    Seed,
    StudentBase,
    StudentName,
)
from flows.recipe.process_rewards import ProcessRewards
from flows.recipe.sections import Base, Problems, Report, RewardModels
from flows.stage_contract.runner import run_stage
from flows.stage_contract.stage import RunContext
from flows.stage_contract.stage_flow import completed, stage_flow
from flows.stages.alignment_rl import policy_stage
from flows.stages.alignment_rounds import models_name, policy_name
from flows.stages.base_model import base_stage
from flows.stages.cold_start_data import stage_of as cold_start_stage
from flows.stages.cold_start_sft import STAGE as COLD_START_SFT
from flows.stages.distill import PREFIX, student_stage
from flows.stages.evaluate import CHECKPOINTS, STUDENTS_AND_ROUNDS, gate_stage, stage_for
from flows.stages.evaluate import R1 as R1_CHECKPOINTS
from flows.stages.problems import STAGE as PROBLEMS
from flows.stages.process_reward_model import STAGE as PROCESS_REWARD_MODEL
from flows.stages.process_reward_model import read_by
from flows.stages.r1_zero import STAGE as R1_ZERO
from flows.stages.reasoning_rl import STAGE as REASONING_RL
from flows.stages.report import STAGE as REPORT
from flows.stages.reward_models import models_stage
from flows.stages.rlhf_ppo import STAGE as RLHF_PPO
from flows.stages.sft import STAGE as SFT_STAGE
from flows.stages.sft_data import STAGE as SFT_DATA
from grpo.config.rl import RL
from grpo.config.supervised import SFT


@stage_flow("problems")
def problems(config: Problems, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None) -> State:
    """Read the problem sources, split them into training and held-out problems, decontaminate."""
    return completed(run_stage(PROBLEMS, config, inputs, seed, where))


@stage_flow("base", lambda parameters: base_stage(parameters.get("student")).name)
def base(
    config: Base,
    inputs: Inputs = None,
    seed: Seed = 0,
    student: StudentBase = None,
    where: RunContext | None = None,
) -> State:
    """Take a pretrained base model into the store, or pretrain a small one."""
    return completed(run_stage(base_stage(student), config, inputs, seed, where))


@stage_flow("cold_start_data")
def cold_start_data(
    config: ColdStartData, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None
) -> State:
    """Write, sample or rewrite a few correct, readable demonstrations of the format."""
    return completed(run_stage(cold_start_stage(config), config, inputs, seed, where))


@stage_flow("cold_start_sft")
def cold_start_sft(config: SFT, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None) -> State:
    """Fine-tune the base model on the demonstrations: Dev1."""
    return completed(run_stage(COLD_START_SFT, config, inputs, seed, where))


@stage_flow("r1_zero")
def r1_zero(config: RL, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None) -> State:
    """GRPO from the base model with rule rewards only: R1-Zero."""
    return completed(run_stage(R1_ZERO, config, inputs, seed, where))


@stage_flow("reasoning_rl")
def reasoning_rl(config: RL, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None) -> State:
    """GRPO with accuracy, format and language rewards: Dev2."""
    return completed(run_stage(read_by(REASONING_RL, config), config, inputs, seed, where))


@stage_flow("process_reward_model")
def process_reward_model(
    config: ProcessRewards, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None
) -> State:
    """Sample chains of reasoning, label their steps by rollouts, and train a model that scores steps."""
    return completed(run_stage(PROCESS_REWARD_MODEL, config, inputs, seed, where))


@stage_flow("sft_data")
def sft_data(config: SFTData, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None) -> State:
    """Sample Dev2, keep what is correct, readable and safe, and mix it."""
    return completed(run_stage(SFT_DATA, config, inputs, seed, where))


@stage_flow("sft")
def sft(config: SFT, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None) -> State:
    """Fine-tune the base model on the rejection-sampled data: Dev3."""
    return completed(run_stage(SFT_STAGE, config, inputs, seed, where))


@stage_flow("student", lambda parameters: PREFIX + parameters["name"])
def student(
    config: SFT, name: StudentName, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None
) -> State:
    """Fine-tune a student on the rejection-sampled data."""
    return completed(run_stage(student_stage(name), config, inputs, seed, where))


@stage_flow("reward_models", lambda parameters: models_name(parameters.get("round", 1)))
def reward_models(
    config: RewardModels,
    inputs: Inputs = None,
    seed: Seed = 0,
    round: AlignmentRound = 1,
    replay_share: ReplayShare = 0.0,
    where: RunContext | None = None,
) -> State:
    """Gather preferences and train the helpful and the safety reward model."""
    return completed(run_stage(models_stage(round, replay_share), config, inputs, seed, where))


@stage_flow("alignment_rl", lambda parameters: policy_name(parameters.get("round", 1)))
def alignment_rl(
    config: RL,
    inputs: Inputs = None,
    seed: Seed = 0,
    round: AlignmentRound = 1,
    where: RunContext | None = None,
) -> State:
    """GRPO with rule rewards, and preference rewards in the last steps: R1."""
    return completed(run_stage(read_by(policy_stage(round), config), config, inputs, seed, where))


@stage_flow("rlhf_ppo")
def rlhf_ppo(config: RL, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None) -> State:
    """PPO with a learnt value on general prompts, from Dev1."""
    return completed(run_stage(RLHF_PPO, config, inputs, seed, where))


@stage_flow(
    "evaluate",
    lambda parameters: "gate" if parameters.get("gate") else "evaluate",
    choices={"stages": lambda: [*CHECKPOINTS, "reward_models"]},
    others=STUDENTS_AND_ROUNDS,
)
def evaluate(
    config: Evaluate,
    stages: EvaluatedStages = R1_CHECKPOINTS,
    inputs: Inputs = None,
    seed: Seed = 0,
    gate: ForGate = False,
    where: RunContext | None = None,
) -> State:
    """Evaluate checkpoints on the held-out problems."""
    stage = gate_stage(stages) if gate else stage_for(stages)
    return completed(run_stage(stage, config, inputs, seed, where))


@stage_flow("report")
def report(config: Report, inputs: Inputs = None, seed: Seed = 0, where: RunContext | None = None) -> State:
    """Write the report of an evaluation."""
    return completed(run_stage(REPORT, config, inputs, seed, where))


STAGE_FLOWS: dict[str, Flow[..., Any]] = {
    flow.name: flow
    for flow in (
        *(problems, base, cold_start_data, cold_start_sft, r1_zero, reasoning_rl, process_reward_model, sft_data, sft),
        *(student, reward_models, alignment_rl, rlhf_ppo, evaluate, report),
    )
}
"""Name of a flow, as in `Step.flow` -> the flow."""
