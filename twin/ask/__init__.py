"""What a question is: names and options become one case."""
