"""Which configuration of a script is the fastest on this machine, from short runs: what to run next, and the answer.

``configurations``  the grid: policy, the script's own options, memory layout, torch.compile
``speed``           a run's speed, and a speed-up with its confidence interval
``plan``            the next run, from what is known
``answer``          a row for each configuration, and the decision

Imports no torch and reads no files.
"""
