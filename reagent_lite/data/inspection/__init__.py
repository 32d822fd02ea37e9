"""A log that nobody has described yet: its columns, what they may be, and a config for it."""
