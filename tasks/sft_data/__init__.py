"""SFT data: rejection sampling, filters, mixing, statistics, and the card that describes a data set."""
