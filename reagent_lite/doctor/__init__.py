"""Checks of this machine, of the share, and of the machines together."""
