"""Runs of a whole recipe: executor, plan, gates, dispatch to work pools, cost estimates, report, model aliases."""
