"""Tasks of a trained policy: simulated logs, evaluation, and scores of rows."""
