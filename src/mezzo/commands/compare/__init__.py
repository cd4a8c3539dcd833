"""``mezzo compare``: one script under several policies, with a verdict on each, from runs that are paired by seed.

``pairing``     which runs belong together; ``baseline``: the runs with which all others are compared
``trends``      runs that diverged or stopped learning
``scales``      the scales on which values are compared; ``gathering``: quantities from runs
``quantities``  what pairs show: intervals, tests for a difference and for equivalence
``costs``       time and memory; ``skips``: skipped updates
``verdicts``    the verdict and its reasons; ``words``: numbers in them; ``judge``: all of these
``together``    several comparisons side by side
"""
