"""``mezzo tune``: the fastest configuration of a script on this machine, measured.

``configurations``  the grid: policy, the script's own options, memory layout, torch.compile; ``ruled_out``: by a ``forecast``
``plan``            the next run, from what is known; ``runs``: does it
``speed``           a run's speed, and a speed-up with its confidence interval
``answer``          a row for each configuration, and the decision
"""
