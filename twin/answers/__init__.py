"""What is answered beside a single prediction: comparisons, crossovers, quality, services under load."""
