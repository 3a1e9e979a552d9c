"""Make the user's autograd functions functional, and share out their tokens."""
