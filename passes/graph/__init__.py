"""The graph and the facts about it; every other folder of passes imports this one."""
