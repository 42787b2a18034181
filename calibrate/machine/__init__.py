"""What a machine is and how fast its memories, links, launches and instructions are: one probe a roof."""
