"""Networks and the preprocessor in front of them; torch only."""
