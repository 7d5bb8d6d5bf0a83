"""Prompt texts of the judges."""
