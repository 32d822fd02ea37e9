"""The report of a run or an evaluation: one HTML page, the evaluation in Markdown, and pictures of a simulated run."""
