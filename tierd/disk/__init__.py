"""Cold tier on disk: slot headers, I/O ports, slab files. The journal's place is here too."""
