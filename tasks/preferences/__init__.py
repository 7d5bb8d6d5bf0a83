"""Preference data: formats, files, and pairs ranked by a judge."""
