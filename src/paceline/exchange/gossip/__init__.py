"""Gossip: every node has a copy of the weights, and copies are mixed two at a time."""
