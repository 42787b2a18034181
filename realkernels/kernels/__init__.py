"""The kernels: a loop for each way to read a cache; what a codec does within it is passed as compile-time functions."""
