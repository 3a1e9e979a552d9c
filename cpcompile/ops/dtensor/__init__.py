"""How operators meet DTensors."""
