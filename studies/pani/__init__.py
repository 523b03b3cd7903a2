"""Pani et al.: a buyer's guide, and the effect of the batch size."""
