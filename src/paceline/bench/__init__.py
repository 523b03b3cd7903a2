"""Benchmarks that users run: trials side by side on the hosts of a lab.

Like the command line it chains stages: a trial is a configuration and a plan, run by real parts.
"""
