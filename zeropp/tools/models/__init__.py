"""Models to train and to plan for: our own GPT and Hugging Face's causal LMs, and their sharding."""
