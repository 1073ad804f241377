"""Kernels of the GPU, in Triton: encode, decode and attend over pages, and merge.

Each takes absolute device addresses of pages, as the CPU's kernels do, and runs
on the current stream without waiting. With TRITON_INTERPRET=1 in the environment
before the first import, every kernel runs in Triton's interpreter on the CPU.
"""
