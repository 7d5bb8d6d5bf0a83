"""The training library: policies, rollouts, rewards, advantages, objectives and the training loops.

It runs standalone (``python -m grpo.train job.json``) and does not depend on Prefect, MLflow or recipes.
"""
