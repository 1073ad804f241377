"""Cold tier on disk, and the form of a slot, which warm and cold share.

header     4 KiB before each page: which page it is, what its bytes must hash to
ports      what is asked of a disk
posix      a folder
memory     a fake in memory, with faults on demand
simulated  a disk that loses what was not synced, and fails as planned (faults, sectors)
slabfiles  cold slabs: one preallocated file each

Journal, snapshots and recovery will stand here.
"""
