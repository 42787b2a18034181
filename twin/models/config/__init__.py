"""Reading a Hugging Face config.json: which architecture it is, its shape, and how its weights are stored."""
