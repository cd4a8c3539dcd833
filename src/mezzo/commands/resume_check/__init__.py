"""``mezzo resume-check``: whether a script's own checkpoints resume the run that was stopped.

``runs``        runs the script to its end, stops it, and starts it once more
``judgement``   whether it continued as if it had not been stopped, and which state it lacks
"""
