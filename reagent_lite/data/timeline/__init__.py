"""Events as transitions: here, or on Spark."""
