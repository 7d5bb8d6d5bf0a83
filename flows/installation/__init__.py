"""What `r1 up` and `r1 deploy` keep running and registered: servers, PostgreSQL, workers, Prefect objects."""
