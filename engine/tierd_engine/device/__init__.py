"""The GPU as a device behind a port: pinning, copies on side streams, attention under them.

`port` is what is asked of a device; `cupyport` is a CUDA GPU, `fake` one of queues with
random delays. All else here runs on either, and is tested on the fake.
"""
