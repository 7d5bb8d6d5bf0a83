"""Test sets: the table of known sets, their settings, and reading them as problems."""
