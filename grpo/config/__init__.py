"""Settings of training and sampling jobs as pydantic models, and the job files that hold them. No torch."""
