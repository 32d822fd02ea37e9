"""Logged data: readers, training copies, normalization, read plans and the batches made from them."""
