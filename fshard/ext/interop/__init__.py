"""State of other libraries: DTensor, torch.distributed.checkpoint, Hugging Face, torch.optim's state."""
