"""Private names of torch that several modules need, under public names, by theme.

A file only hands names on, so that frames of errors and what Dynamo traces are torch's
own. Who needs one theme imports no other: dynamo.py alone is slow to import. Names that
one module needs stay in it, and say so there.
"""
