"""Exported models: judged on logs and in simulation, and playing."""
