"""What `bounds="warn"` counted of ids that no table has, by the device of the ids. Imports torch and errors."""

import warnings

import torch

from tiny_engram.errors import TableError

__all__ = ["OutsideCounters"]


class OutsideCounters:
    """A counter for each device that ids came from."""

    def __init__(self):
        self._counters: dict[torch.device, torch.Tensor] = {}

    def at(self, device: torch.device) -> torch.Tensor:
        """int64 ``[2]`` on a device: ids outside the table so far, and the first of them.

        Raises:
            TableError: it would be made while a stream is captured, and anew at each replay.
        """
        if device not in self._counters:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise TableError("the first lookup with bounds='warn' is captured: look up once before, to make its counter")
            with torch.inference_mode(False):
                self._counters[device] = torch.zeros(2, dtype=torch.int64, device=device)
        return self._counters[device]

    def total(self) -> int:
        """How many ids were counted; waits for the devices."""
        return sum(int(counter[0]) for counter in self._counters.values())

    def check(self) -> int:
        """Warn the caller's caller of what was counted, and count anew; waits for the devices. Returns how many they were."""
        total = 0
        for device, counter in self._counters.items():
            found, first = counter.tolist()
            if found:
                total += found
                counter.zero_()
                where = f"{found} row ids looked up on {device} are not in the table, the first was {first}"
                warnings.warn(f"{where}: they were read as zeros; mend the ids, or use bounds='ignore'", RuntimeWarning, stacklevel=3)
        return total
