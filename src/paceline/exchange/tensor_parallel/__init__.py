"""Tensor parallel: linear layers whose weights are split over nodes, while activations travel."""
