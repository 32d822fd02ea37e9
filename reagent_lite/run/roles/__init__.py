"""simulation.mode: a collector, the rows that a learner takes from collectors, and published policies."""
