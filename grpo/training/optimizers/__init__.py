"""Optimizers that PyTorch does not have, or not in the form that is needed here."""
