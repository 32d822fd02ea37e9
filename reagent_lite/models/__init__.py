"""Networks and their preprocessor; torch only."""
