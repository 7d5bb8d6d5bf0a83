"""Exports a checkpoint as a Hugging Face folder with a model card."""
