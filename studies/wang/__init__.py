"""MNIST over MPI, as Wang and Yang trained it."""
