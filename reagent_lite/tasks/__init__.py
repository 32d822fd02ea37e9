"""What a trained policy is used for: it plays and logs, is evaluated, and scores rows."""
