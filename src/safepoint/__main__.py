"""``python -m safepoint``: the command line, also where the script was not put on the path."""

import sys

from safepoint.cli import main

if __name__ == "__main__":
    sys.exit(main())
