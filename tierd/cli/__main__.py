"""`python -m tierd.cli`: the same as `tierd`."""

import sys

from tierd.cli.door import main

if __name__ == "__main__":
    sys.exit(main())
