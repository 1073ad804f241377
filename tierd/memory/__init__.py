"""Shared memory between the daemon, which decides, and the engines, which compute.

memfd      sealed memory that cannot leak, shrink, or be promised and not be there
fds        messages with file descriptors over the bootstrap socket
pagetable  where each page of a session is: written by the daemon, read by engines
epochs     when a retired slot may be reused
slabs      equal slots and their life cycle, the same for warm and cold
"""
