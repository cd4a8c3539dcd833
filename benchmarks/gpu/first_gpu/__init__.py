"""What is a GPU asked first, in stages of at most eight minutes?

Without a stage, all run, the most valuable first. A case is one process, and each result is a file that appears when the case ends: for a
stage ``kernels`` with a case ``roofs``, ``kernels/roofs.json`` is the result, ``kernels/roofs.log`` what the process printed, as it came,
and ``kernels/roofs/`` what it wrote. Each test has a result of its own below ``pytest/``, with its traceback, written when it ends.

The same command again continues: what has a result is not measured again, and what was cut begins again, or continues if its program can.
So a stage may be cut at any second. To measure a case again, remove its ``.json``. Code, torch and GPU name the folder of the results
below ``--out``: if one of them changes, everything is measured again, in another folder.

``--dry-run`` runs tiny cases on a CPU to test all this. Nothing is installed: a case whose packages or programs are missing is reported as
not run. Exit code: 0 if all was measured and nothing failed, 1 if a case failed, 3 without a GPU, 4 if cases are left for the next time.
"""
