"""`paceline bench`: trials side by side on the hosts of a lab, faults and nights.

Like the package's own command line it chains stages: a trial is a configuration and a plan, run by
real parts.
"""
