"""The reporting stage: what people look at. Imports no torch."""
