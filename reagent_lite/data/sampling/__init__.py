"""Which rows when, and their batches."""
