"""simulation.mode: collectors, the replay of their rows in a learner, and published policies."""
