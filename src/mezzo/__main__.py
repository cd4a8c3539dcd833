"""``python -m mezzo`` is ``mezzo``."""

import os
import sys

if not getattr(sys.flags, "safe_path", False) and sys.path[:1] in ([""], [os.getcwd()]):
    del sys.path[0]  # python -m puts the folder there, and a file in it would hide a module of the same name

from mezzo.cli import main

sys.exit(main())
