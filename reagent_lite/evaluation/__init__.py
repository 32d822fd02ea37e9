"""What a policy is worth: estimates from logged episodes, and returns in simulation."""
