"""Given examples: SFT rows of others that enter the mix beside sampled ones."""
