"""A training run: its data, environments, learner, evaluators, checkpoints and exports."""
