"""The wire: generated messages (v1), their conversions, errors, and the bootstrap handshake."""
