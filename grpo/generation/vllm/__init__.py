"""Generation with vLLM: engines inside the trainer, servers of their own, and weight transfer to them."""
