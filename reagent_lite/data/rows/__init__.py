"""Record batches as checked rows and their faults: the contract of a row."""
