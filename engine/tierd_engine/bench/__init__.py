"""Benchmarks: each prints its figure, its limit and the ratio. Run them with `scripts/bench`."""
