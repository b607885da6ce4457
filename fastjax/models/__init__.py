"""Flax models: configs, layers, LoRA, checkpoints, generation."""
