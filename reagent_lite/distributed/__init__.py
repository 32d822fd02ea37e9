"""Processes of one run: who they are, how they start, how they agree."""
