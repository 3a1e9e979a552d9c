"""Hand on the process group that exchanges nothing; importing it registers it."""

# What DTensor remembers of meshes, of which two of different groups compare equal;
# seen in 2.13.
from torch.distributed.tensor.debug import _clear_sharding_prop_cache as forget_meshes

# The store of init_process_group("fake", store=...); seen in 2.11 to 2.15.
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["FakeStore", "forget_meshes"]
