"""``python -m mezzo`` is ``mezzo``."""

import sys

from mezzo.cli import main

sys.exit(main())
