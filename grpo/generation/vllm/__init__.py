"""Generation with vLLM: engines inside the trainer, separate servers, and weight transfer to them."""
