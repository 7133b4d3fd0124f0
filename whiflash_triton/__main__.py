"""`python -m whiflash_triton` is `whiflash`."""

import sys

from .cli import main

sys.exit(main())
