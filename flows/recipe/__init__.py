"""Recipes: the typed configuration, loading it from TOML with overrides, and value lists for deployment forms."""
