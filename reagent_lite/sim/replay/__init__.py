"""A ring of transitions, and prioritized sampling."""
