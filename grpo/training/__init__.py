"""Supervised training (pretraining, SFT, reward models, step labels) and optimizers."""
