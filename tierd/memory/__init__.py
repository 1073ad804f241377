"""Shared memory: sealed memfds, slabs and their allocator, page table, epochs, fd passing."""
