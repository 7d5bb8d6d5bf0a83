"""Engines that sample completions: in process with transformers or vLLM, on a server, or through an endpoint."""
