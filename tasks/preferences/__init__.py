"""Preference pairs: formats, files, and pairs that a judge ranked."""
