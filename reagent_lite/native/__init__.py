"""Compiled code for this machine, found again once it is built."""
