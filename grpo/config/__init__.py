"""Settings of training and sampling jobs, and the job files that hold them, as pydantic models. Does not import
torch."""
