"""The loop, its metrics, its progress and its checkpoint."""
