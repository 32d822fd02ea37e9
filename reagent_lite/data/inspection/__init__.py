"""A log without a description: its columns, the fields they may be, and a config for it."""
