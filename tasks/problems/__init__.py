"""Problem sets: sources, loading, checks against held-out data, and a miniature set that needs no network."""
