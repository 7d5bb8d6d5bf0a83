"""Given examples: SFT rows from elsewhere that enter the mix in addition to sampled ones."""
