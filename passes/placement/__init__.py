"""What rules for calls are made of: functions that place, move and pick tokens."""
