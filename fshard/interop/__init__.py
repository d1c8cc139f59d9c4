"""State of other libraries: DTensor, torch.distributed.checkpoint, Hugging Face, state dicts; and safetensors files."""
