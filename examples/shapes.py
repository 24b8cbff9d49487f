"""Draw a folder of small images of circles, squares and triangles, so that the examples need no download."""

import numpy as np
from PIL import Image, ImageDraw

CLASSES = ("circle", "square", "triangle")


def draw_shape(name, rng, size=32):
    """Return an image of a shape with a random colour and place on a noisy background."""
    noise = rng.integers(0, 90, (size, size, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    draw = ImageDraw.Draw(image)
    radius = int(rng.integers(size // 5, size // 3))
    x, y = (int(rng.integers(radius, size - radius)) for _ in range(2))
    colour = tuple(int(value) for value in rng.integers(140, 256, 3))
    box = (x - radius, y - radius, x + radius, y + radius)
    if name == "circle":
        draw.ellipse(box, fill=colour)
    elif name == "square":
        draw.rectangle(box, fill=colour)
    else:
        draw.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=colour)
    return image


def draw_folder(folder, images_per_class):
    """Write a folder of class folders and return it."""
    for number, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(images_per_class):
            draw_shape(name, np.random.default_rng([number, i])).save(folder / name / f"{i:04}.png")
    return folder
