"""The measuring stage: what this machine is and how fast it trains this workload."""
