"""`python -m dflash_chat`."""

import sys

from dflash_chat.cli import main

if __name__ == "__main__":
    sys.exit(main())
