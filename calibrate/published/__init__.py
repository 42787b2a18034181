"""What others published of their machines: their rows, the twin's answer to each, and rates that only rows can set."""
