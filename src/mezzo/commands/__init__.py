"""The commands, a folder each: ``command`` has its options and exit code, ``record`` what it learned, ``page`` what that says in words.

What else a folder has is the command's own: what to run next, and its verdict. ``record`` and ``page`` import neither torch nor the rest of
the command, so that a record can be shown without them.
"""
