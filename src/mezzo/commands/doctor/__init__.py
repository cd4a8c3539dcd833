"""``mezzo doctor``: the formats that this machine computes in."""
