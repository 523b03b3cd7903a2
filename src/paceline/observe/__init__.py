"""What happened, written down while it happens, and what it adds up to afterwards; no torch."""
