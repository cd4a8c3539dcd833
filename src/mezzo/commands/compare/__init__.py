"""``mezzo compare``: one script under several policies, with a verdict on each, from runs that are paired by seed.

``pairing``     which runs belong together; ``baseline``: the runs with which all others are compared
``trends``      runs that diverged or stopped learning; the quantities of the others
``quantities``  what pairs show, on the scale of each quantity: intervals, tests for a difference and for equivalence
``costs``       time, memory, skipped updates
``judge``       the verdicts and their reasons, from all of these
``together``    several comparisons side by side
"""
