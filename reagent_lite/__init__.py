"""Train DQN and parametric DQN policies from logged decisions and from simulation."""
