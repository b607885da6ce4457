"""Checkpoints in and out: Hugging Face folders, hub ids and GGUF files."""
