"""``mezzo fallback``: the modules of a script that must stay in FP32, verified.

``find``        find them, given a way to run a few steps; ``runs``: that way, for a script
``search``      a small set with few verifications, and how large the error of a gradient may be, the runs it may request next
"""
