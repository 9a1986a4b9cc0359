"""Which GTP size? What a job would do on a cluster, from one rank of it that runs on the meta device.

[Note: how a plan is made]
    1. ``rank``, ``device``: one rank of the real job is built under torch's fake process group, on the meta device, and
       makes its step: the same modules, autograd functions, schedule and optimizer as in training.
    2. ``record``: an observer writes down what that gives the device to do, in the host's order: kernels with their
       operations and bytes, collectives with their bytes and ranks, waits; and what is in memory, by kind.
    3. ``simulate``, ``network``: that list is played on the streams of a GPU whose rates a cluster file tells.
    4. ``search``: the same for many arrangements of degrees; ``pipeline`` puts stages together.
    5. ``report``, ``charts``, ``calibrate``: what people read, and how far it is from what was measured.
"""
