"""What an inference step would cost: counts, roofs, an event simulation and a prediction with an interval."""
