"""Guards for torchft's training classes: LocalSGD and DiLoCo change the state inside the write lock.

The facade comes in; nothing else imports this room.
"""
