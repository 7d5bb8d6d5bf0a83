"""One module per stage of a recipe, each a Prefect flow, on the stage contract that they share."""
