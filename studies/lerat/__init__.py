"""Lerat et al. (2022): local parallelism first, then MPI."""
