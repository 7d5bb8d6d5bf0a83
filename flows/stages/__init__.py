"""One module per stage of a recipe, each with a Prefect flow. flows/stage_graphs.py puts them in order."""
