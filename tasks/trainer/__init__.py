"""Runs the trainers of grpo/: as subprocesses, as forks of a preloaded process, and on several machines."""
