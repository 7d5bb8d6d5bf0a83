"""Process groups, sharded models (FSDP), and checkpoints written by many ranks."""
