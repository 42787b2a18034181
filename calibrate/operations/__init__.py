"""The table of operations: each row says how an operation is counted, timed, calibrated, validated and fitted."""
