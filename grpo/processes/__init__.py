"""Worker pools, process lifetimes, memory readings and the metrics log. Does not import torch."""
