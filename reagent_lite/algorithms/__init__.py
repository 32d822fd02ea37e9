"""Learners: the loss of a batch, and the update of target networks after an optimizer step."""
