"""Parameter servers: nodes that hold shards of the weights, and the workers that push and pull."""
