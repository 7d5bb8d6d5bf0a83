"""The recipe on Prefect: configuration, stages, the pipelines that chain them, the installation, and the command r1."""
