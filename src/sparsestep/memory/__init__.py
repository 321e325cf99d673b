"""Memory of tensors: lazily zeroed state, huge pages, and memory-mapped files.

``mapped_file`` recognizes tensors in files by their address, and creates their state. ``formats``
has what is written to files, ``disk`` the calls to the operating system.
"""
