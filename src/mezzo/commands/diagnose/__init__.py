"""``mezzo diagnose``: where the first value that is not finite comes from, and how to fix it.

``plan``        which run comes next, from the evidence of the others
``verdict``     the verdict, from the evidence of all runs; ``words``: its sentences, with the place of a fix
``offers``      fixes as data, with their lines for each framework; ``fixes``: which to offer
"""
