"""How long ops take on a machine, one by one and together."""
