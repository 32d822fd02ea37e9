"""Environments in bulk: one kernel source, compiled for the CPU or a GPU, behind one protocol."""
