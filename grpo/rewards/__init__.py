"""Reward functions, the registry that finds them, and the verifiers and measures that they use. Does not import
torch."""
