"""A writer of TensorBoard's event files."""

from collections.abc import Mapping
from typing import Any


class TensorBoardWriter:
    """Writes scalars into a folder that TensorBoard reads.

    Example:
        >>> import tempfile
        >>> from sdc.integrations import TensorBoardWriter
        >>> with TensorBoardWriter(tempfile.mkdtemp()) as writer:
        ...     writer.write_scalars(7, {"sdc/checked": 4.0, "sdc/flagged": 0.0})
    """

    def __init__(self, folder: str) -> None:
        """Opens the folder.

        Raises:
            ModuleNotFoundError: the extra `tensorboard` is not installed.
            OSError: the folder cannot be written.
        """
        from .._lazy import remedy

        try:
            from tensorboardX import SummaryWriter
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"TensorBoard {remedy('tensorboard')}") from error
        self._writer = SummaryWriter(folder)

    def write_scalars(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes scalars of a step; they are on disk when the writer is closed, or a few seconds later."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, float(value), step)

    def close(self) -> None:
        """Writes what is left."""
        self._writer.close()

    def __enter__(self) -> "TensorBoardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
