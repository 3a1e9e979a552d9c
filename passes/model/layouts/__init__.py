"""Choose in which layout the tokens of every value are: contiguous or balanced."""
