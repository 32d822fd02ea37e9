"""A ring of transitions, and prioritised sampling."""
