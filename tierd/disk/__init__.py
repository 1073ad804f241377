"""Cold tier on disk, and the form of a slot, which warm and cold share.

header     4 KiB before each page: which page it is, what its bytes must hash to
ports      what is asked of a disk
posix      a folder
memory     a fake in memory, with faults on demand
simulated  a disk that loses what was not synced, and fails as planned (faults, sectors)
slabfiles  cold slabs: one preallocated file each

What is in the cold tier is remembered across restarts:

ledger      the door: what is said is in order, and durable after `flush(sync=True)`
records     what is said: rows of pages, sessions, slabs (rows in columns: image)
frames      batches of records, chained; journal appends them, window looks at them
snapshot    the image in one file
superblock  which store, how often opened, how far the journal reached
recovery    snapshot and journal up to its end, less what cannot be (prune)
quarantine  which slots were given up, as text for people
volatile    a ledger that keeps nothing; fsck checks and mends a folder
"""
