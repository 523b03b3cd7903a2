"""Engines whose agents run inside somebody else's cluster: Ray, Spark."""
