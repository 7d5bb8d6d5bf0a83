"""Judges that score completions: language models, endpoints and rules, with their settings, bias and calibration."""
