"""``mezzo check``: which precision a script should train in, with one answer.

``plan``        the policies worth trying, and what to do next: pure functions; ``runs``: does it
``worth``       whether a policy's gains are worth a switch
``answer``      the answer, from all of these; ``conclusion``: the record with it
``patches``     the change to the script, and its trial
"""
