"""Record batches as checked rows and their faults: the rules of a row."""
