"""Decisions of an exported model over HTTP, in a log that trains the next one."""
