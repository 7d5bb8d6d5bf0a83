"""Units of work: problem sets, launching trainers, judging, filtering, evaluation, the store and tracking."""
