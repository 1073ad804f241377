"""The engine of tierd: hot pages, attention over tiers, and long-document jobs.

Importing this package loads nothing heavy; its modules import torch.
"""

from tierd.began import BEGAN_NS as BEGAN_NS  # first: before a source of the engine is read
