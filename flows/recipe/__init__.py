"""Recipes: the typed configuration, its loading from TOML with overrides, and lists for deployment forms."""
