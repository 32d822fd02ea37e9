"""Many environments at once: one kernel source for the CPU and the GPU, behind one protocol."""
