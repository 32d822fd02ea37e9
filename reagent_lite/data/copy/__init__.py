"""Checked rows as the memory-mapped training copy."""
