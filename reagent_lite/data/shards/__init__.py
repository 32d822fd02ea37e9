"""Whole episodes for each machine."""
