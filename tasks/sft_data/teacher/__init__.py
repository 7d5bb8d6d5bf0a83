"""Teachers: models that write data instead of the policy."""
