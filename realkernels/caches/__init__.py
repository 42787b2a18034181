"""Where caches lie: host memory that a device reads, planes of sparse attention, interleaved blocks of codecs."""
