"""The runs of one command: what its plan wants next, what ran already, and how runs share this machine or a cluster."""
