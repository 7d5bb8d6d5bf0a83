"""MLflow tracking: runs, tags and the model registry, written and read back. No other package imports MLflow."""
