"""MLflow: the only package that imports it. Runs, tags, the model registry and reading them back."""
