"""Who sees what, and which token lies where: integers, without tensors of a model."""
