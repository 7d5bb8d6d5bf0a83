"""Engines that sample completions: in process with transformers, on replicas, or through an endpoint."""
