"""Checks of this machine, of the share, and of all machines together."""
