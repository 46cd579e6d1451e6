"""The step's kernels. Each file holds one: its plain-torch reference, its Triton version and the function that picks
by the device of its tensors. On the CPU the reference is what runs."""
