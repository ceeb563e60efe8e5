"""Guards for torchft's training classes: LocalSGD and DiLoCo change the state inside the write lock.

Only the facade imports this package.
"""
