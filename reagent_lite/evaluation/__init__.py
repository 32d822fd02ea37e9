"""Evaluation of policies: estimates from logged episodes, and returns in simulation."""
