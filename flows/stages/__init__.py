"""One module per stage of a recipe, each a Prefect flow. flows/stage_graphs.py puts them in order."""
