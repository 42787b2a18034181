"""Where prediction and measurement meet: recorded figures, comparison and its tolerances."""
