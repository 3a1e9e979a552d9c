"""How Inductor compiles the local graph: lowerings, order of messages, overlap."""
