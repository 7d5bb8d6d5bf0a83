"""A language model as judge, at an endpoint or in this process: prompts, replies, votes, cache and budget. Imports
torch only when a local model is loaded."""
