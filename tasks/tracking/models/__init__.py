"""Checkpoints as MLflow models: their files, versions, aliases and scores."""
