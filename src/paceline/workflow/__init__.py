"""The only chain of stages, used by the Python API and by every command alike."""
