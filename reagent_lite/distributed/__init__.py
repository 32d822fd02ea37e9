"""Processes of a run: their ranks and machines, their start, and communication between them."""
