"""What is known of machines: profiles, their links, and which one is used."""
