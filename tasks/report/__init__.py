"""The report page: tables, learning curves, data sections, and comparisons of runs."""
