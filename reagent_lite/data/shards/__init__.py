"""Whole episodes dealt to machines."""
