"""``mezzo check``: which precision a script should train in, with one answer.

``offers``      the policies worth trying on a device, and why; whether the script switches mixed precision on by itself
``plan``        what to do next, a pure function; ``runs``: does it
``worth``       whether a policy's gains are worth a switch
``answer``      the answer, from all of these; ``conclusion``: the record with it
``patches``     the change to the script, and its trial
"""
