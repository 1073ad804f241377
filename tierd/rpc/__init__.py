"""The wire: generated messages (v1), their conversions, errors, and the bootstrap handshake."""

import os

# gRPC's core writes notes on stderr when a peer goes away; who wants them has set this.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
