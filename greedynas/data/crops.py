"""Random crops of whole images that are kept in memory, for `data.augment: resized_crop`.

The images of a training must not depend on the size of the memory. They are therefore kept whole, as large as the
smallest crop needs them (`View.whole`), and cropped like files by `transforms.random_crop`: the same box, resampled by
the same filter. An image that is not larger gives the same pixels; a larger one is resampled twice
(docs/guide/training.md).
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from greedynas.data.transforms import Numbers, Pixels, resized

Rows = NDArray[np.int64]
AT_ONCE = 64  # images that a GPU crops at a time: their pixels as floats take a few hundred MB


@dataclass(frozen=True)
class WholeImages:
    """Images of different sizes, concatenated."""

    pixels: Tensor  # uint8 (number of pixels, channels) on the device, row by row
    sizes: Rows  # (n, 2) height, width
    aspects: Numbers  # (n,) width / height in the file, which the crops depend on
    starts: Rows  # (n,) first pixel

    @classmethod
    def of_squares(cls, squares: Tensor) -> "WholeImages":
        """Return the same pixels (n, side, side, channels) as whole images, without a copy."""
        count, side = squares.shape[:2]
        sizes = np.full((count, 2), side, np.int64)
        return cls(squares.reshape(-1, squares.shape[3]), sizes, np.ones(count), np.arange(count) * side**2)

    def own_bytes(self, squares: Tensor) -> int:
        """Return the memory that the images use in addition to the squares, which they may share it with."""
        return 0 if self.pixels.data_ptr() == squares.data_ptr() else self.pixels.nbytes

    def on_cpu(self) -> "WholeImages":
        return replace(self, pixels=self.pixels.cpu())

    def image(self, row: int) -> Tensor:
        """Return one image: (height, width, channels)."""
        height, width = (int(length) for length in self.sizes[row])
        start = int(self.starts[row])
        return self.pixels[start : start + height * width].view(height, width, -1)

    def crops(self, rows: Rows, plan: Numbers, size: int) -> Tensor:
        """Return the crops of these images by a `View.crop_plan`, resized: (n, size, size, channels), 0 to 255."""
        if self.pixels.device.type == "cpu":
            return self._one_by_one(rows, plan, size)
        parts = [self.batched(rows[i : i + AT_ONCE], plan[i : i + AT_ONCE], size) for i in range(0, len(rows), AT_ONCE)]
        return torch.cat(parts)

    def _one_by_one(self, rows: Rows, plan: Numbers, size: int) -> Tensor:
        """Return the crops made by Pillow, which is faster on a CPU and gives the same pixels as a streaming set."""

        def crop(i: int) -> Pixels:
            pixels = self.image(int(rows[i])).numpy()
            height, width, channels = pixels.shape
            x, y, w, h, flip = plan[i]
            picture = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
            part = resized(picture, size, (x * width, y * height, (x + w) * width, (y + h) * height))
            return part[:, ::-1] if flip else part

        threads = min(torch.get_num_threads(), len(rows))
        if threads <= 1:
            return torch.from_numpy(np.stack([crop(i) for i in range(len(rows))]))
        with ThreadPoolExecutor(threads) as pool:
            return torch.from_numpy(np.stack(list(pool.map(crop, range(len(rows))))))

    def batched(self, rows: Rows, plan: Numbers, size: int) -> Tensor:
        """Return the crops made by two matrix products: their rows and columns are weighted sums of the image's."""
        device = self.pixels.device
        heights, widths = self.sizes[rows].T
        x, y, w, h, flips = plan.T
        top, down = _weights(y * heights, h * heights, heights, size, np.zeros(len(rows)), device)
        left, across = _weights(x * widths, w * widths, widths, size, flips, device)
        y_at, x_at = (
            torch.minimum(
                first[:, None] + torch.arange(weights.shape[2], device=device), _sent(limits - 1, device)[:, None]
            )
            for first, weights, limits in ((top, down, heights), (left, across, widths))
        )
        at = (_sent(self.starts[rows], device)[:, None] + y_at * _sent(widths, device)[:, None])[:, :, None] + x_at[
            :, None
        ]
        pixels = self.pixels[at].float()  # (n, rows, columns, channels)
        n, _, columns, channels = pixels.shape
        lines = torch.bmm(down, pixels.flatten(2)).view(n, size, columns, channels)
        crossed = torch.bmm(across, lines.transpose(1, 2).reshape(n, columns, size * channels))
        return crossed.view(n, size, size, channels).transpose(1, 2).contiguous()


def _weights(
    start: Numbers, length: Numbers, limits: Rows, size: int, flips: Numbers, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the first pixel of each crop along an axis (n,), and the weights of the pixels from there on.

    The weights are (n, size, pixels), with sum 1 for each of the crop's `size` pixels. The filter is Pillow's bilinear
    one: a triangle, which is wider if a crop is made smaller.
    """
    start, end = np.clip(start, 0, limits), np.clip(start + length, 0, limits)
    scale = (end - start) / size
    support = np.maximum(scale, 1.0)
    first = np.maximum(np.floor(start + scale / 2 - support), 0)
    last = np.minimum(np.ceil(end - scale / 2 + support), limits)
    count = max(1, int((last - first).max()))
    places = np.arange(size) + 0.5
    places = np.where(flips[:, None] > 0, size - places, places)
    centres = _sent(start[:, None] + places * scale[:, None] - first[:, None], device, torch.float32)
    pixels = torch.arange(count, device=device) + 0.5
    weights = 1 - (pixels - centres[:, :, None]).abs() / _sent(support, device, torch.float32)[:, None, None]
    weights = weights.clamp_(min=0) * (pixels < _sent(limits - first, device, torch.float32)[:, None, None])
    return _sent(first, device, torch.int64), weights / weights.sum(2, keepdim=True)


def _sent(array: NDArray[np.float64] | Rows, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return the array on the device, without waiting for earlier work of the device."""
    tensor = torch.from_numpy(array)
    tensor = tensor if dtype is None else tensor.to(dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class Growing:
    """A collection of whole images that grows while they are read, up to a number of pixels."""

    def __init__(self, channels: int, device: torch.device, expected: int, most: int) -> None:
        self.most = most  # pixels
        self._room = torch.empty((min(max(expected, 1), most), channels), dtype=torch.uint8, device=device)
        self._used = 0
        self._sizes: list[Rows] = [np.empty((0, 2), np.int64)]
        self._aspects: list[Numbers] = [np.empty(0)]

    def add(self, pixels: Tensor, sizes: Rows, aspects: Numbers) -> bool:
        """Add images, whose pixels follow one another in one array (pixels, channels); return False if they do not fit."""
        needed = self._used + len(pixels)
        if needed > self.most:
            return False
        if needed > len(self._room):
            larger = min(self.most, max(needed, len(self._room) * 5 // 4))
            room = torch.empty((larger, self._room.shape[1]), dtype=torch.uint8, device=self._room.device)
            room[: self._used] = self._room[: self._used]
            self._room = room
        self._room[self._used : needed] = pixels.to(self._room.device)
        self._used = needed
        self._sizes.append(sizes)
        self._aspects.append(aspects)
        return True

    def wholes(self) -> WholeImages:
        sizes = np.concatenate(self._sizes)
        ends = np.cumsum(sizes.prod(axis=1))
        return WholeImages(self._room[: self._used], sizes, np.concatenate(self._aspects), ends - sizes.prod(axis=1))
