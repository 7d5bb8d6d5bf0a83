"""The chaos suite: stages of a small recipe under named faults, against undisturbed runs. See docs/reliability.md."""
