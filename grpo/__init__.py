"""The training library: policies, rollouts, rewards, advantages, objectives and the training loops.

It runs by itself (``python -m grpo.train job.json``) and knows nothing of Prefect, MLflow or recipes.
"""
