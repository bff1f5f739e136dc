"""Models to train and to plan for: our own GPT, Hugging Face's, and how both are sharded."""
