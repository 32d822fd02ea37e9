"""Learners: one loss over a batch, and what follows an optimizer step."""
