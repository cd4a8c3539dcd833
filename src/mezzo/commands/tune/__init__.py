"""``mezzo tune``: the fastest configuration of a script on this machine, measured.

``plan``        the grid of configurations, and the next run from what is known; ``runs``: does it
``ruled_out``   configurations that a ``forecast`` leaves out
``answer``      a row for each configuration, and the decision
"""
