"""The command r1. Each subcommand has a module."""
