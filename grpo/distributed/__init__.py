"""Process groups, sharded parameters (FSDP), and checkpoints written by many ranks."""
