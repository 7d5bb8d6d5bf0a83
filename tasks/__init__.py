"""Building blocks of stages: problem sets, trainers, judging, filtering, evaluation, the artifact store and
tracking."""
