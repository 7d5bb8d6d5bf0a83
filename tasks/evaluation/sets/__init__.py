"""Test sets by name: the table of known ones, settings, and reading them as problems."""
