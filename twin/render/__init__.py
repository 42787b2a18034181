"""How answers are shown: text, JSON, a trace; nothing here computes a prediction."""
