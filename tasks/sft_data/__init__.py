"""SFT data: rejection sampling, filters, mixing, statistics, and the data card."""
