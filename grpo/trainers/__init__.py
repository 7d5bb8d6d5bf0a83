"""Engines of other projects that run a job in the place of this library's trainer: a folder for each."""
