"""Statistics, normalization and drift of features."""
