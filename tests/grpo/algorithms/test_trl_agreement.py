"""TRL's own trainers, fed the same tensors, give the same loss, gradient and advantages.

What differs by design: TRL divides by std + 1e-4 and knows the sample's std only; its `epsilon_high` of CISPO is the
bound itself and there is no lower one; with sequence-level ratios it corrects the KL by the sequence's ratio, r1flow by
the token's; its BNPO counts micro-batches alike, r1flow by their sequences. TRL 1.16 corrects the KL by default. It has
no PPO and no GSPO-token any more, so these have no counterpart here.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

pytest.importorskip("trl")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from grpo.algorithms.advantages import ADVANTAGES
from grpo.algorithms.dpo import dpo_loss
from grpo.algorithms.objectives import Objective
from grpo.algorithms.tokens import Normalizers, Tokens
from grpo.model.logprobs import completion_logprobs
from grpo.model.packed.attention import NAME

LENGTHS = [5, 1, 3, 4, 2, 5, 4, 1]
WIDTH, BUDGET, BETA = 5, 6, 0.3
KL_TERMS = [(0.0, False), (BETA, False), (BETA, True)]  # coefficient, correction for stale samples
WORDS = ["<pad>", "<eos>", "a", "b", "c", "d", "e", "f"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> str:
    torch.manual_seed(0)
    shape = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    special = dict(pad_token_id=0, eos_token_id=1, bos_token_id=None)
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), initializer_range=0.5, **shape, **special)).save_pretrained(
        folder
    )
    return str(folder)


def on_cpu(folder, **options) -> dict:
    return (
        dict(output_dir=str(folder), report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False) | options
    )


@pytest.fixture
def grpo_trainer(model_folder, tokenizer, tmp_path):
    def make(parts: int = 1, rewards: list[float] | None = None, **options) -> GRPOTrainer:
        trainer = GRPOTrainer(
            model_folder,
            reward_funcs=lambda completions, **_: rewards,
            args=GRPOConfig(
                **on_cpu(tmp_path),
                per_device_train_batch_size=len(LENGTHS) // parts,
                gradient_accumulation_steps=parts,
                num_generations=4,
                max_completion_length=BUDGET,
                **options,
            ),
            train_dataset=Dataset.from_dict({"prompt": ["a b", "c d"]}),
            processing_class=tokenizer,
        )
        trainer.current_gradient_accumulation_steps = parts  # the training loop sets it before each step
        trainer.model.train()
        return trainer

    return make


def random_tokens() -> Tokens:
    """Ratios from about 1/3 to 3, advantages of both signs."""
    generator = torch.Generator().manual_seed(2)

    def draw() -> Tensor:
        return torch.randn(len(LENGTHS), WIDTH, generator=generator, dtype=torch.float64) / 2

    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).double()
    advantages = draw()[:, :1].expand_as(mask)
    return Tokens((draw() - 2).requires_grad_(), draw() - 2, draw() - 2, advantages, mask)


def loss_and_gradient_of_trl(
    trainer: GRPOTrainer, tokens: Tokens, parts: int, one_update: bool
) -> tuple[float, Tensor]:
    """TRL's loss on given log-probabilities; what a forward pass would have computed is the one thing replaced."""
    total = torch.zeros(())
    for rows in torch.arange(len(LENGTHS)).chunk(parts):
        logprobs = tokens.logprobs[rows]
        trainer._get_per_token_logps_and_entropies = lambda *_, x=logprobs, **__: (x, torch.zeros_like(x), None)
        inputs = {
            "prompt_ids": torch.ones(len(rows), 2, dtype=torch.long),
            "prompt_mask": torch.ones(len(rows), 2, dtype=torch.long),
            "completion_ids": torch.ones(len(rows), WIDTH, dtype=torch.long),
            "completion_mask": tokens.mask[rows].long(),
            "advantages": tokens.advantages[rows, 0],
            "ref_per_token_logps": tokens.ref_logprobs[rows],
            "num_items_in_batch": tokens.mask.sum(),
        }
        if not one_update:
            inputs["old_per_token_logps"] = tokens.old_logprobs[rows]
        total = total + trainer._compute_loss(trainer.model, inputs)
    return total.item(), torch.autograd.grad(total, tokens.logprobs)[0]


def loss_and_gradient(objective: Objective, tokens: Tokens, parts: int) -> tuple[float, Tensor, dict[str, float]]:
    normalizers = Normalizers(sequences=len(LENGTHS), tokens=sum(LENGTHS), budget=BUDGET)
    results = [
        objective(Tokens(*(x[rows] for x in vars(tokens).values())), normalizers)
        for rows in torch.arange(len(LENGTHS)).chunk(parts)
    ]
    total = torch.stack([loss for loss, _ in results]).sum()
    shares = {name: sum(stats[name].item() for _, stats in results) for name in ("clipped_low", "clipped_high", "kl")}
    return total.item(), torch.autograd.grad(total, tokens.logprobs)[0], shares


VARIANTS = {  # r1flow's name -> TRL's
    "grpo": dict(loss_type="grpo"),
    "grpo_single_update": dict(loss_type="grpo"),
    "bnpo": dict(loss_type="bnpo"),
    "dr_grpo": dict(loss_type="dr_grpo"),
    "dapo": dict(loss_type="dapo"),
    "gspo": dict(loss_type="grpo", importance_sampling_level="sequence"),
}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (0.05, 0.3), (10.0, 10.0)])
@pytest.mark.parametrize(
    ("name", "beta", "stale"),
    [(n, *kl) for n in VARIANTS for kl in KL_TERMS if (n, *kl) != ("gspo", BETA, True)],  # other ratios, see above
)
def test_loss_gradient_and_clipped_shares(grpo_trainer, name, beta, stale, low, high, parts):
    trainer = grpo_trainer(
        parts, beta=beta, epsilon=low, epsilon_high=high, use_bias_correction_kl=stale, **VARIANTS[name]
    )
    one_update = name == "grpo_single_update"
    tokens = random_tokens()
    if one_update:  # TRL then takes the policy itself for the sampler, for the KL's correction too
        tokens = Tokens(tokens.logprobs, tokens.logprobs.detach(), tokens.ref_logprobs, tokens.advantages, tokens.mask)
    objective = Objective(
        name, clip_eps_low=low, clip_eps_high=high, kl_coef=beta, kl_estimator="k3", kl_stale_correction=stale
    )
    loss, gradient, shares = loss_and_gradient(objective, tokens, parts)
    expected_loss, expected_gradient = loss_and_gradient_of_trl(trainer, tokens, parts, one_update)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-9)
    if parts == 1 and name != "gspo":  # TRL counts sequences there
        logged = trainer._metrics["train"]
        assert shares["clipped_low"] == pytest.approx(logged["clip_ratio/low_mean"][0], abs=1e-6)
        assert shares["clipped_high"] == pytest.approx(logged["clip_ratio/high_mean"][0], abs=1e-6)
        if beta:
            assert shares["kl"] == pytest.approx(logged["kl"][0], rel=1e-6)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("beta", "stale"), KL_TERMS)
@pytest.mark.parametrize("bound", [1.2, 5.0])
def test_cispo(grpo_trainer, bound, beta, stale, parts):
    trainer = grpo_trainer(parts, loss_type="cispo", beta=beta, epsilon_high=bound, use_bias_correction_kl=stale)
    objective = Objective(
        "cispo", clip_eps_low=1.0, clip_eps_high=bound - 1, kl_coef=beta, kl_estimator="k3", kl_stale_correction=stale
    )
    tokens = random_tokens()
    loss, gradient, _ = loss_and_gradient(objective, tokens, parts)
    expected_loss, expected_gradient = loss_and_gradient_of_trl(trainer, tokens, parts, one_update=False)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-9)


def test_the_clips_above_bind():
    """Otherwise the agreement would say nothing of clips."""
    tokens = random_tokens()
    for name in ("grpo", "gspo", "cispo"):
        objective = Objective(
            name, clip_eps_low=0.2, clip_eps_high=0.2, kl_coef=0.0, kl_estimator="k3", kl_stale_correction=False
        )
        shares = loss_and_gradient(objective, tokens, 1)[2]
        assert shares["clipped_low"] > 0.05 and shares["clipped_high"] > 0.05


def test_through_the_model_with_a_temperature(grpo_trainer, model_folder):
    """Nothing replaced: TRL's log-probabilities and ours, back to the gradient of every parameter."""
    prompts, completions = [[2, 3, 4], [5], [6, 7]], [[3, 4, 5, 1], [2, 2], [7, 6, 1]]
    lengths = torch.tensor([len(c) for c in completions])
    mask = (torch.arange(4) < lengths[:, None]).float()
    generator = torch.Generator().manual_seed(1)
    old, reference = (torch.rand(3, 4, generator=generator) - 2.5 for _ in range(2))
    advantages = torch.tensor([1.0, -0.5, -0.5])

    trainer = grpo_trainer(loss_type="dapo", beta=BETA, epsilon=0.2, temperature=0.7, use_bias_correction_kl=True)
    trl_loss = trainer._compute_loss(
        trainer.model,
        {
            "prompt_ids": torch.tensor([[2, 3, 4], [0, 0, 5], [0, 6, 7]]),
            "prompt_mask": torch.tensor([[1, 1, 1], [0, 0, 1], [0, 1, 1]]),
            "completion_ids": torch.tensor([[3, 4, 5, 1], [2, 2, 0, 0], [7, 6, 1, 0]]),
            "completion_mask": mask.long(),
            "advantages": advantages,
            "old_per_token_logps": old,
            "ref_per_token_logps": reference,
            "num_items_in_batch": mask.sum(),
        },
    )
    trl_loss.backward()

    policy = LlamaForCausalLM.from_pretrained(model_folder, attn_implementation=NAME)
    tokens = Tokens(
        logprobs=completion_logprobs(policy, prompts, completions, 0.7),
        old_logprobs=old,
        ref_logprobs=reference,
        advantages=advantages[:, None].expand_as(mask),
        mask=mask,
    )
    objective = Objective(
        "dapo", clip_eps_low=0.2, clip_eps_high=0.2, kl_coef=BETA, kl_estimator="k3", kl_stale_correction=True
    )
    loss, _ = objective(tokens, Normalizers(sequences=3, tokens=int(mask.sum()), budget=BUDGET))
    loss.backward()
    assert loss.item() == pytest.approx(trl_loss.item(), abs=1e-5)
    assert_same_gradients(policy, trainer.model)


def assert_same_gradients(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    expected = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.grad.abs().max() > 0
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("loss_type", "length_average"), [("sigmoid", False), ("sigmoid_norm", True)])
def test_dpo(model_folder, tokenizer, tmp_path, loss_type, length_average):
    trainer = DPOTrainer(
        model_folder,
        args=DPOConfig(**on_cpu(tmp_path), beta=BETA, loss_type=loss_type, precompute_ref_log_probs=False),
        train_dataset=Dataset.from_dict({"prompt": ["a"], "chosen": [" b"], "rejected": [" c"]}),
        processing_class=tokenizer,
    )
    policy, reference = (LlamaForCausalLM.from_pretrained(model_folder, attn_implementation=NAME) for _ in range(2))
    with torch.no_grad():  # a policy that has moved from its reference, the same in both
        generator = torch.Generator().manual_seed(2)
        for ours, theirs in zip(policy.parameters(), trainer.model.parameters(), strict=True):
            theirs.copy_(ours.add_(torch.randn(ours.shape, generator=generator) / 10))
    trainer.model.train()  # it logs by mode
    prompts, chosen, rejected = [[2, 3], [4]], [[5, 6, 1], [7, 1]], [[6, 1], [2, 3, 4]]
    rows = [
        prompt + completion for side in (chosen, rejected) for prompt, completion in zip(prompts, side, strict=True)
    ]
    starts = torch.tensor([len(prompt) for prompt in prompts * 2])[:, None]
    attention = torch.arange(5) < torch.tensor([len(row) for row in rows])[:, None]
    trl_loss = trainer._compute_loss(
        trainer.model,
        {
            "input_ids": torch.tensor([row + [0] * (5 - len(row)) for row in rows]),
            "attention_mask": attention.long(),
            "completion_mask": (attention & (torch.arange(5) >= starts)).long(),
        },
        return_outputs=False,
    )
    trl_loss.backward()

    with torch.no_grad():
        references = [completion_logprobs(reference, prompts, side, 1.0) for side in (chosen, rejected)]
    masks = [torch.arange(3) < torch.tensor([len(c) for c in side])[:, None] for side in (chosen, rejected)]
    loss, stats = dpo_loss(
        *(completion_logprobs(policy, prompts, side, 1.0) for side in (chosen, rejected)),
        *references,
        *(mask.float() for mask in masks),
        beta=BETA,
        length_average=length_average,
        pairs=2,
    )
    loss.backward()
    assert loss.item() == pytest.approx(trl_loss.item(), abs=1e-5)
    assert_same_gradients(policy, trainer.model)
    logged = trainer._metrics["train"]
    assert stats["accuracy"].item() == logged["rewards/accuracies"][0]
    if not length_average:  # TRL logs sums in both forms
        assert stats["margin"].item() == pytest.approx(logged["rewards/margins"][0], abs=1e-5)


REWARDS = [1.0, 0.0, 1.0, 0.0, 0.5, 0.5, 0.5, 0.5]  # the hens, and a group that teaches nothing


def advantages_of_trl(trainer) -> Tensor:
    """Sampled and scored by TRL; the rewards are the trainer's reward function's."""
    return trainer._generate_and_score_completions([{"prompt": "a b"}] * 4 + [{"prompt": "c d"}] * 4)["advantages"]


@pytest.mark.parametrize(
    ("name", "scale_rewards", "std"),
    [
        ("grpo", "group", 3**-0.5),  # deviations 1/2: 4 * 1/4 / 3 = 1/3
        ("batch_std", "batch", 7**-0.5),  # 4 * 1/4 / 7 = 1/7
        ("dr_grpo", "none", None),
    ],
)
def test_advantages(grpo_trainer, name, scale_rewards, std):
    theirs = advantages_of_trl(grpo_trainer(rewards=REWARDS, scale_rewards=scale_rewards))
    ours = ADVANTAGES[name](torch.tensor(REWARDS).view(2, 4), "sample").flatten()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
    shrunk = 1.0 if std is None else std / (std + 1e-4)  # TRL's guard against a division by 0
    torch.testing.assert_close(ours * shrunk, theirs, rtol=1e-5, atol=1e-5)


def test_leave_one_out_advantages(model_folder, tokenizer, tmp_path):
    trainer = RLOOTrainer(
        model_folder,
        reward_funcs=lambda completions, **_: REWARDS,
        args=RLOOConfig(
            **on_cpu(tmp_path), per_device_train_batch_size=8, num_generations=4, max_completion_length=BUDGET, beta=0.0
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a b", "c d"]}),
        processing_class=tokenizer,
    )
    ours = ADVANTAGES["rloo"](torch.tensor(REWARDS).view(2, 4), "population").flatten()
    torch.testing.assert_close(ours, advantages_of_trl(trainer), rtol=1e-5, atol=1e-5)
