"""A loop of one's own: `paceline.Pace`, see docs/own-loop.md.

ranks       the processes that train together, whoever started them
gradients   sums of gradients over ranks, divided once by the weight of the whole batch
batches     every rank's part of each batch of a DataLoader
across      losses that look across the samples of a batch, by their graphs (heads, factors)
meter       what an epoch was: samples, seconds, and what was logged
keeping     the run directory, checkpoints and what a resumed loop goes on from
loop        `Pace`, which puts these together
"""
