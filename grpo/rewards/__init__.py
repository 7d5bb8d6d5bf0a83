"""Reward functions, the registry that finds them, and the verifiers and measures they use. No torch."""
