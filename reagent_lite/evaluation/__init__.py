"""Counterfactual policy evaluation: what a learned policy is worth, judged from logged episodes."""
