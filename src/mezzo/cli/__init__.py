"""The command line. Everything is imported inside ``main``, so that Ctrl-C is quiet from the first moment."""

from __future__ import annotations

import atexit
import gc
import io
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code; Mezzo's own errors are two lines on standard error, never a traceback."""
    words = sys.argv[1:] if arguments is None else arguments
    atexit.register(_end_at_once)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for what its encoding lacks
    try:
        return _main(words)
    except KeyboardInterrupt:
        return 130


def _main(words: list[str]) -> int:
    from mezzo.cli.parser import exit_code_of, failed, unusable
    from mezzo.cli.ranks import in_ranks
    from mezzo.cli.words import TYPED_WORDS
    from mezzo.errors import MezzoError
    from mezzo.launch.ranks.launched import report_failure

    token = TYPED_WORDS.set(tuple(words))
    try:
        return in_ranks(words, lambda: exit_code_of(list(words)))
    except MezzoError as error:  # raised before the command began, by the checks of the launcher's processes
        exit_code = failed(error)
    except OSError as error:
        exit_code = unusable(error)
    finally:
        TYPED_WORDS.reset(token)
    report_failure(exit_code, words[0])
    return exit_code


def _end_at_once() -> None:
    """Let Python end without a search for garbage, which takes half a second once torch is imported."""
    if "triton" not in sys.modules:  # it calls its own objects a leak if they are not collected
        gc.freeze()
