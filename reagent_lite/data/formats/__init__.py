"""Files of any format as Arrow record batches."""
