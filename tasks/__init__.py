"""Units of work: problem sets, trainers, judging, filtering, evaluation, the artifact store and tracking."""
