"""The training loop, its metrics, signals and checkpoints."""
