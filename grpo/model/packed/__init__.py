"""Sequences packed without padding: attention and token log-probabilities."""
