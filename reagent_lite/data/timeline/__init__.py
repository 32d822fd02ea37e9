"""Events as transitions: DuckDB here, or Spark."""
