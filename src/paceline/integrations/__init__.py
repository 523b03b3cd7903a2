"""Unequal shares with exact weights inside other people's training loops.

    lightning     Trainer(strategy=SharesStrategy([3, 1]), use_distributed_sampler=False)
    huggingface   SharesTrainer(..., shares=[3, 1]), or SharesMixin for a Trainer of one's own
    accelerate    SharesAccelerator(shares=[3, 1])
    shares        what all three stand on, and what a loop of plain DDP can use itself

Each needs its package: pip install 'paceline[lightning]', 'paceline[huggingface]' or
'paceline[accelerate]'. See docs/integrations.md.
"""
