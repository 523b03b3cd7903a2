"""Paceline."""
