"""Evaluation metrics: accuracy, refusals, win rates, and the quality of reward models."""
