"""What launchers say to the processes that they start, and what torchrun reads of these, checked on 2.13."""

import json
import os
import sys
import time
from contextlib import suppress

# Names the file from which torchrun takes the error of a process for its summary; torchrun sets it for each process.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def report_to_launcher(text: str) -> None:
    """Write an error to standard error and to torchrun's file at once, if torchrun started this process.

    torchrun looks at its processes ten times a second. As soon as one has died it ends the others by SIGTERM, mostly
    before they can print the error that they are about to raise.

    Args:
        text: The class and the text of the error.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    with suppress(Exception):
        print(text, file=sys.stderr, flush=True)
    if os.path.exists(path) and not os.path.isfile(path):
        return
    # As torch.distributed.elastic.multiprocessing.errors.ErrorHandler does of an exception. torchrun fails on half a
    # file, so this one appears as a whole.
    extra_info = {"py_callstack": text, "timestamp": str(int(time.time()))}
    unfinished = f"{path}.fshard"
    with suppress(OSError):
        with open(unfinished, "w") as file:
            json.dump({"message": {"message": text, "extraInfo": extra_info}}, file)
        os.replace(unfinished, path)


def withdraw_report() -> None:
    """Remove an error from torchrun's file, when the program goes on in the same process."""
    path = os.environ.get(ERROR_FILE)
    if path and os.path.isfile(path):
        with suppress(OSError):
            os.remove(path)
