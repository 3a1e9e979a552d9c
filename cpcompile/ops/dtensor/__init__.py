"""The operators on DTensors: sharding rules, handlers and local parts."""
