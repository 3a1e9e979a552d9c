"""Reading what attention masks say."""
