"""Worker pools, process lifetimes, memory readings and the metrics log. No torch."""
