"""`scripts/gpu-check`: what a machine with a GPU must show, in parts that fail one by one."""
