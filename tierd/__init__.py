"""tierd: a long-context LLM's KV cache over VRAM, host RAM and NVMe.

This package holds the daemon, the client, the codecs and the command line.
It never imports torch or cupy; the engine, `tierd_engine`, does.
"""

from tierd.began import BEGAN_NS as BEGAN_NS  # first: before a source is read
from tierd.types import CodecId, DType, Geometry, Namespace, PageKey, Place, Tier

__version__ = "0.1.0"

__all__ = [
    "CodecId",
    "DType",
    "Geometry",
    "Namespace",
    "PageKey",
    "Place",
    "Tier",
    "__version__",
]
