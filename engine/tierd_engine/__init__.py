"""The engine of tierd: hot pages, attention over tiers, and long-document jobs.

Importing this package loads nothing heavy; its modules import torch.
"""
