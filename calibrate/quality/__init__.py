"""`twin quality`: what cache formats do to attention, measured on heads from a file or on made-up ones."""
