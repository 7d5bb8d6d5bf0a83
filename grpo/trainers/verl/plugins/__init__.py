"""What verl loads of this library: these modules run in verl's own environment."""
