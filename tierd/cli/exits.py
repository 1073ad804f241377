"""Exit codes of `tierd`. A TierdError carries its own; these are the command line's."""

FAILED = 1
USAGE = 2
DEGRADED = 4
INTERRUPTED = 130
READER_GONE = 141  # 128 + SIGPIPE, as a shell reports it
