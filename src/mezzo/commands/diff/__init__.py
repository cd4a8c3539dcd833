"""``mezzo diff``: where two runs part, what began it, and what helps.

``align``    which event of one run is which of the other; ``judge``: what rounding explains, and where the rest began
``sides``    the two runs: two policies, commits, scripts or records; ``trials``: policies that could help, tried
"""
