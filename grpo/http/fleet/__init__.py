"""Requests spread over several endpoints that serve the same model."""
