"""Private names of torch that several modules need, under public names, by theme.

A file only hands names on, so that frames of errors and what Dynamo traces are torch's
own. They are as many as differ in what they cost to import: dynamo.py and inductor.py
are slow. Names that one module needs stay in it, and say so there.
"""

# Nested containers; seen in 2.11 to 2.15. torch.utils.pytree, which is public, is not
# in 2.13.
from torch.utils import _pytree as pytree
