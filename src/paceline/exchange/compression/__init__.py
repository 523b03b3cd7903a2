"""Gradients that travel smaller than they are."""
