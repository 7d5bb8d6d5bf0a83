"""A language model as judge: prompts, replies, votes, cache and budget, at an endpoint or in this process. No torch
until a local model is loaded."""
