"""Scoring of completions with rewards and reward models, and the weights of the total reward."""
