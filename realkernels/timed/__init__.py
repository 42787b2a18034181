"""Every operation as a timed call: see `call.TimedCall`."""
