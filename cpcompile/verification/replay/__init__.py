"""Finding the first call whose value differs, by running both graphs call by call."""
