"""Sources that a run can learn from: logs, environments, both, and the episodes of collectors."""
