"""The global program becomes a sharded one."""
