"""What happened, written down while it happens."""
