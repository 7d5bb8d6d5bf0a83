"""Sampling jobs over whole problem sets, in shards that resume after a crash."""
