"""Whether a training has the bits of one process."""
