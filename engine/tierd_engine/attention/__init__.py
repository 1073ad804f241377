"""Attention over tiers: the operator `partial -> (o, lse)`, its merge, and the executors."""
