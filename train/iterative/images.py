"""Small labeled images (Fashion-MNIST, scikit-learn's digits, or a folder of idx files), and batches of images.

Replicas on two hosts must train on the same images. Known files are verified by SHA-256, and the digest of the arrays
covers all training and test data.

Letters in shapes:

    N  images of a set     h, w  height and width     B  images of a batch
"""

import dataclasses
import functools
import hashlib
import importlib
import os
import sys
from pathlib import Path

import grain
import numpy as np
from jaxtyping import Float32, Int32, Int64, UInt8

from sdc.settings import SettingError

from .. import DataError
from .archives import cache_folder, fixed_order, freeze, read_file

DIGITS = "digits"  # 1,797 images of 8x8 pixels that come with scikit-learn; the default, which needs no network

FASHION_MNIST = "fashion-mnist"  # 70,000 images of 28x28 pixels, from a Debian package

AUTO = "auto"  # Fashion-MNIST if available, otherwise digits

PACKAGE = "dataset-fashion-mnist"  # Debian package of Fashion-MNIST, about 31 MB

INSTALLED = Path("/usr/share/datasets/fashion-mnist")  # install path of that package's files

# The four files of a data set in the format of MNIST, each plain or with the suffix `.gz`.
FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)

# Digests of the decompressed contents: recompressing the images changes the .gz files, but not these digests.
_SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
_TEST_DIGITS = 360  # a fifth of the images


class ImagesError(DataError):
    """Images are missing or damaged; the message identifies them and states the remedy."""

    of = "images"


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """Labeled images for training and testing. The arrays are read-only."""

    train_images: Float32[np.ndarray, "N h w 1"]  # float32 in [0, 1], one channel
    train_labels: Int32[np.ndarray, "N"]  # classes of `train_images`, from 0
    test_images: Float32[np.ndarray, "N h w 1"]  # images for testing, in the format of `train_images`
    test_labels: Int32[np.ndarray, "N"]  # classes of `test_images`, from 0
    classes: int  # number of classes
    source: str  # origin of the images, for the run record
    digest: str  # SHA-256 (hexadecimal) over the four arrays, shapes included

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of an image."""
        _, height, width, channels = self.train_images.shape
        return height, width, channels


def read_images(source: str | Path = DIGITS) -> Images:
    """Reads scikit-learn's digits, Fashion-MNIST (from the Debian package, or from files that a user put into the
    cache), `auto` (Fashion-MNIST if available, otherwise digits), or a folder of four idx files named as in `FILES`."""
    # A Path never equals a string: Path("digits") is a folder of that name.
    if source == DIGITS:
        return _digits("scikit-learn digits")
    if source == FASHION_MNIST:
        return _fashion_mnist()
    if source == AUTO:
        try:
            return _fashion_mnist()
        except ImagesError as error:
            return _digits(f"scikit-learn digits, because {FASHION_MNIST} {error.problem.partition('; ')[0]}")
    if not os.path.isdir(source):  # unlike Path.is_dir, False also if a parent is not accessible
        raise ImagesError(
            source, f"is not a folder; expected {DIGITS}, {FASHION_MNIST}, {AUTO} or a folder of idx files"
        )
    return _from_files(_read_folder(Path(source)), str(source))


def image_batches(images: Images, *, batch_size: int, seed: int) -> grain.DatasetIterator:
    """Returns an endless iterator over batches of training images and labels. The order differs between epochs, but not
    between hosts; a batch may span two epochs, so that all images are used equally often."""
    assert batch_size >= 1, batch_size
    count = len(images.train_labels)
    if batch_size > count:
        raise ImagesError(
            images.source,
            f"has {count} training images, but a batch needs {batch_size}; use smaller batches or other images",
        )
    if not 0 <= seed < 2**64:
        raise SettingError("seed", seed, "expected a whole number from 0 to 2^64 - 1")

    @functools.lru_cache(maxsize=2)  # a batch spans at most two epochs
    def order(epoch: int) -> Int64[np.ndarray, "N"]:
        return fixed_order(count, seed, epoch)

    def batch(step: int) -> tuple[Float32[np.ndarray, "B h w 1"], Int32[np.ndarray, "B"]]:
        places = range(step * batch_size, (step + 1) * batch_size)
        chosen_B = np.array([order(place // count)[place % count] for place in places])
        return images.train_images[chosen_B], images.train_labels[chosen_B]

    # Whole batches are read, because grain's shuffle and batch operate on single images, which takes longer than a
    # training step on digits.
    return iter(
        grain.MapDataset.range(sys.maxsize)
        .map(batch)
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    )


def _digits(source: str) -> Images:
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ModuleNotFoundError as error:
        raise ImagesError(
            DIGITS,
            "needs scikit-learn, which is not installed; run pip install 'jax-sdc[study]', or give a folder "
            "of idx files",
        ) from error
    pixels, labels = datasets.load_digits(return_X_y=True)
    order = fixed_order(len(labels), 5, 0)  # a seed that gives 30 to 41 test images of every digit
    pixels = (pixels[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1)  # exact, since pixels are integers up to 16
    labels = labels[order].astype(np.int32)
    train, test = slice(_TEST_DIGITS, None), slice(_TEST_DIGITS)
    return _images(pixels[train], labels[train], pixels[test], labels[test], source)


def _fashion_mnist() -> Images:
    reasons = []
    for state, place in (("installed", lambda: INSTALLED), ("cached", lambda: cache_folder(FASHION_MNIST))):
        try:
            contents = _read_folder(place())
            for name, data in contents.items():
                if (found := hashlib.sha256(data).hexdigest()) != _SHA256[name]:
                    raise ImagesError(name, f"has SHA-256 {found}, expected {_SHA256[name]}; download it again")
        except DataError as error:
            # The remedy for a user's folder is omitted, because the remedy below covers both folders.
            reasons.append(f"not {state} ({error.given}: {error.problem.partition('; ')[0]})")
        else:
            return _from_files(contents, f"Fashion-MNIST (Debian package {PACKAGE}, {state})")
    raise ImagesError(
        FASHION_MNIST,
        f"is {', '.join(reasons)}; install the Debian package {PACKAGE}, give a folder of its files, or use {DIGITS}",
    )


def _read_folder(folder: Path) -> dict[str, bytes]:
    """Reads the decompressed contents of the four files."""
    contents = {}
    for name in FILES:
        plain, packed = folder / name, folder / f"{name}.gz"
        try:
            contents[name] = read_file(plain if os.path.exists(plain) else packed)
        except DataError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                raise ImagesError(
                    folder, f"has no {name} or {name}.gz; give a folder with {' '.join(FILES)}"
                ) from error
            raise ImagesError(error.given, error.problem) from error
    return contents


def _from_files(contents: dict[str, bytes], source: str) -> Images:
    train_images, train_labels, test_images, test_labels = (
        _idx(contents[name], rank, f"{source}: {name}") for name, rank in zip(FILES, (3, 1, 3, 1), strict=True)
    )
    for part, pixels, labels in (("train", train_images, train_labels), ("t10k", test_images, test_labels)):
        if len(pixels) != len(labels):
            raise ImagesError(
                source,
                f"{part} has {len(pixels)} images but {len(labels)} labels; give files of one data set",
            )
    if train_images.shape[1:] != test_images.shape[1:]:
        raise ImagesError(
            source,
            f"has training images of {train_images.shape[1:]} but test images of {test_images.shape[1:]}; "
            "give files of one data set",
        )
    train, test = (pixels[..., None] / np.float32(255) for pixels in (train_images, test_images))
    return _images(train, train_labels.astype(np.int32), test, test_labels.astype(np.int32), source)


def _idx(data: bytes, rank: int, place: str) -> UInt8[np.ndarray, "..."]:
    """Parses an idx file of bytes, which consists of a magic number whose last byte is the rank, the sizes (big-endian)
    and the values."""
    header = 4 * (1 + rank)
    magic = 0x800 + rank
    if len(data) < header or int.from_bytes(data[:4], "big") != magic:
        raise ImagesError(
            place,
            f"begins with 0x{data[:4].hex()}, expected 0x{magic:08x} (an idx file of bytes with rank {rank}); write "
            "the file again",
        )
    shape = tuple(np.frombuffer(data, ">u4", rank, offset=4).tolist())
    expected = header + int(
        np.prod(shape, dtype=object)
    )  # arbitrary precision: sizes of four bytes each may overflow 64 bits
    if len(data) != expected or 0 in shape:
        raise ImagesError(
            place,
            f"has {len(data)} bytes, expected {expected} for shape {shape}, and at least one value; write the "
            "file again",
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _images(
    train_images: Float32[np.ndarray, "N h w 1"],
    train_labels: Int32[np.ndarray, "N"],
    test_images: Float32[np.ndarray, "N h w 1"],
    test_labels: Int32[np.ndarray, "N"],
    source: str,
) -> Images:
    arrays = (train_images, train_labels, test_images, test_labels)
    classes = 1 + int(max(train_labels.max(), test_labels.max()))
    return Images(*arrays, classes, source, freeze(*arrays))
