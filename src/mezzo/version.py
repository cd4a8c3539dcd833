"""The version of Mezzo: the one place where it is written.

``pyproject.toml`` reads it, so package, records, documentation and ``mezzo --version`` agree. The metadata of an editable installation are
of the day it was installed; this is the version of the code that runs.
"""

VERSION = "0.2.0"
