"""Evaluation metrics: accuracy, refusals, win rates, and how well reward models rank."""
