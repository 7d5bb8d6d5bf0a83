"""Groups the settings of large sections in Prefect's forms: common ones first, the others by subject."""

from __future__ import annotations

OBJECTIVES = (
    *("grpo", "grpo_sequence", "grpo_single_update", "dapo", "bnpo", "dr_grpo", "gspo", "gspo_token", "cispo"),
    "likelihood",
)
"""Names of the objectives, so that a form can list them without loading torch."""

CHOICES: dict[tuple[str, str], tuple[str, ...]] = {("RL", "objective"): OBJECTIVES}
"""(model, field) -> names that the field accepts, for fields that only the code using them checks."""

GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "RL": {
        "": (
            *("steps", "prompts_per_step", "group_size", "method", "objective", "kl_coef"),
            *("rewards", "optimizer", "sampling", "engine"),
        ),
        "Loss": (
            *("clip_eps_low", "clip_eps_high", "kl_estimator", "kl_stale_correction", "advantage", "std"),
            *("minibatches", "inner_epochs", "reference_refresh_steps", "reference_mixing"),
            *("supervision", "step_reward"),
        ),
        "Prompts": (
            *("general_last_steps", "general_share", "source_weights", "curriculum"),
            *("dynamic_sampling_rounds", "mask_truncated", "max_new_tokens_from"),
        ),
        "Rewards": ("reward_models", "uncertainty_penalty", "branch_weights", "judge", "scoring"),
        "Methods": ("ppo", "dpo", "lora", "experts"),
        "Checks": ("validate_every", "validation", "keep", "save_every", "samples_every", "health"),
        "Hardware": ("micro_batch_tokens", "rollouts_ahead", "sampler_ratio_max", "hardware"),
    },
    "JudgeSettings": {
        "": ("kind", "base_url", "model", "api_key_env", "path"),
        "Request": ("temperature", "seed", "max_tokens", "request", "device", "batch_size"),
        "Verdict": (
            *("verifier", "quality_min", "votes", "compare_votes", "agreement_min", "ask_again", "on_disagreement"),
            *("calibration", "audit_share", "decides_unsure"),
        ),
        "Service": (
            *("timeout_s", "retries", "backoff_s", "away_max_s", "concurrency", "requests_per_minute"),
            *("budget_requests", "budget_tokens"),
        ),
    },
    "SFTData": {
        "": ("problems", "general", "samples_per_problem", "keep_per_problem", "sampling", "engine", "teacher"),
        "Samples": ("enough_right", "samples_max", "sampling_by_source", "rewards", "scoring"),
        "Filters": ("filters", "judge", "judged"),
        "Mix": ("mix",),
        "Hardware": ("shard_problems", "hardware", "ray"),
    },
    "VLLM": {
        "": ("kind", "url", "tensor_parallel_size", "max_model_len", "gpu_memory_utilization"),
        "Server": ("api_key_env", "timeout_s", "retries", "concurrency", "transfer"),
        "Memory": ("kv_cache_gb", "dtype", "enforce_eager", "options"),
    },
    "SFT": {
        "": ("epochs", "batch_size", "optimizer"),
        "Length": ("max_steps", "max_tokens"),
        "Method": ("lora",),
        "Checks": ("validate_every", "validation", "keep", "save_every"),
        "Hardware": ("micro_batch_tokens", "hardware"),
    },
    "Pretrain": {
        "": ("steps", "batch_size", "optimizer"),
        "Model": ("vocabulary", "hidden", "feed_forward", "layers", "heads", "context"),
        "Hardware": ("micro_batch_tokens", "hardware", "save_every"),
    },
    "RewardModels": {
        "": ("prompts", "responses_per_prompt", "files", "helpful", "safe", "judge"),
        "Responses": ("sampling", "engine"),
        "Pairs": ("judgments_per_pair", "margin", "length_ratio_max", "held_out_share"),
    },
    "RewardModel": {
        "": ("epochs", "batch_size", "optimizer"),
        "Model": ("margin", "centring", "ensemble"),
        "Length": ("max_steps", "max_tokens"),
        "Hardware": ("micro_batch_tokens", "hardware", "save_every"),
    },
    "Evaluate": {
        "": ("problems", "general", "samples_per_problem", "k", "sets"),
        "Samples": ("general_samples", "sampling", "engine", "judge", "alignment_scores", "confidence"),
        "Hardware": ("hardware",),
    },
    "ColdStartData": {
        "": ("source", "problems", "general", "samples_per_problem"),
        "Samples": ("sampling", "engine", "rewriter", "habits", "filters"),
        "Hardware": ("hardware",),
    },
    "Hardware": {
        "": ("device", "processes", "dtype", "mixed_precision", "gradient_checkpointing"),
        "Several devices": ("nodes", "sequence_parallel", "tensor_parallel", "trainer"),
        "More": ("sampler", "attention", "fused", "remote_code"),
    },
    "RunContext": {
        "": ("force", "recipe", "time_limit_hours"),
        "Recipe's run": ("parent_run_id", "label", "key"),
    },
}
"""Model -> subject -> fields. The fields of subject "" come first and keep their titles; the titles of others start
with the subject. Fields that are not listed come last."""
