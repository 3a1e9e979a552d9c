"""Random programs through backend="cp", compared with one process.

    tools/in_venv python -m tests.fuzz --minutes 10

draw.py draws a program, render.py writes it as Python, on_rank.py runs it on every rank
and compares it, judge.py gives the verdict, minimise.py makes a failing one smaller.
"""
