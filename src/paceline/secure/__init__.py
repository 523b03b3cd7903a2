"""Connections between processes that know one secret: `sealing` (no I/O), `line`, `door`."""
