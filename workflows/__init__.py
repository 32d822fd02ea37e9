"""Entry points: the only place where everything meets."""
