"""Judges of completions (language models, endpoints and rules), with their settings, bias and calibration."""
