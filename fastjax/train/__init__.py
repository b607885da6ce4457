"""Training: data, losses, step, optimiser, checkpoints, loop, command line."""
