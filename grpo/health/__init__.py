"""Checks of every training step for known failure modes, and guards that stop a run."""
