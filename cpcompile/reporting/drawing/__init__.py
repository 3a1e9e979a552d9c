"""Plans as pictures (matplotlib, extra `plot`) and as a page that holds them."""
