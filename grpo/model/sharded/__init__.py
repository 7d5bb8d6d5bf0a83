"""Models that no process holds whole: each reads its shards from the files."""
