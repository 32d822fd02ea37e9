"""Rows to files of any format."""
