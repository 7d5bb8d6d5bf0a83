"""The command r1: one module per subcommand."""
