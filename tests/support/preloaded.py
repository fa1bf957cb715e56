"""What the process has imported that tests fork the project's commands from.

Their garbage collector need not look through all of that, which takes longer than a tiny run does:
half of its time goes into copying the pages that a look writes to.
"""

import atexit
import gc

import matplotlib.pyplot  # noqa: F401
import torch._dynamo  # noqa: F401
import torch.distributed.run  # noqa: F401

import ddp_train  # noqa: F401

gc.freeze()
atexit.register(gc.unfreeze)  # else libraries would report leaks
gc.freeze = gc.unfreeze = lambda: None  # it stays so, whatever they do
