"""Sequences packed without padding: attention, token log-probabilities and value heads over them."""
