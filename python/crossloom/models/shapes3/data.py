"""Seeded generator of drawings, questions, answers and spoken questions.

A scene is one to three coloured shapes; a question asks for a colour, a kind,
a number, a presence or what lies on one side of a shape. Only questions with
one possible answer are asked. Train and held-out scenes are disjoint twice:
by seed, and by *composition*: a hash of the multiset of (kind, colour) pairs
sends one composition in eight to the held-out side alone, so held-out
accuracy is about unseen combinations and not only unseen positions.

Everything is vectorised over the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from . import vocab
from .config import CONFIG
from .features import log_mel

KINDS = ("circle", "square", "triangle", "cross")
PLURALS = ("circles", "squares", "triangles", "crosses")
COLORS = ("red", "green", "blue", "yellow", "white", "purple")
NUMBERS = ("zero", "one", "two", "three")
SIDES = ("left of", "right of", "above", "below")
MAX_SHAPES = 3

_RGB = np.array(
    [
        [0.90, 0.12, 0.12],
        [0.12, 0.75, 0.18],
        [0.15, 0.30, 0.95],
        [0.95, 0.88, 0.12],
        [0.95, 0.95, 0.95],
        [0.65, 0.18, 0.80],
    ],
    dtype=np.float32,
)

# A shape nearer than this to being level with another is on neither side.
_SIDE_MARGIN = 4.0

_PAIRS = tuple(f"{color} {kind}" for kind in KINDS for color in COLORS)
ANSWERS = COLORS + KINDS + NUMBERS + ("yes", "no", "nothing") + _PAIRS
_ANSWER = {answer: index for index, answer in enumerate(ANSWERS)}
_PAIR0 = _ANSWER[_PAIRS[0]]

QUESTIONS = (
    tuple(f"color of the {kind}?" for kind in KINDS)
    + tuple(f"shape that is {color}?" for color in COLORS)
    + ("how many shapes?",)
    + tuple(f"how many {plural}?" for plural in PLURALS)
    + tuple(f"any {pair}?" for pair in _PAIRS)
    + tuple(f"{side} the {kind}?" for side in SIDES for kind in KINDS)
)
# Question families, for balanced sampling and for reporting.
FAMILIES = ("color", "shape", "count", "count-kind", "any", "side")
FAMILY = np.repeat(np.arange(6), [4, 6, 1, 4, 24, 16])


@dataclass(frozen=True)
class Scenes:
    """A batch of scenes; absent shapes have kind and colour -1.

    ``kind``, ``color``: ``(batch, 3)`` int; ``center``: ``(batch, 3, 2)``
    pixels as (x, y); ``radius``: ``(batch, 3)`` pixels.
    """

    kind: np.ndarray
    color: np.ndarray
    center: np.ndarray
    radius: np.ndarray

    @property
    def present(self) -> np.ndarray:
        """``(batch, 3)`` bool."""
        return self.kind >= 0


@dataclass(frozen=True)
class Sample:
    """One question about one drawing, with arrays as the entries take them.

    Attributes
    ----------
    image : np.ndarray
        ``(1, 3, 48, 48)`` float32 in [0, 1].
    question, answer, family : str
        Text; `family` is one of `FAMILIES`.
    log_mel : np.ndarray or None
        ``(1, 40, 128)`` float32 where the question is spoken.
    """

    image: np.ndarray
    question: str
    answer: str
    family: str
    log_mel: np.ndarray | None = None


def _held_out_composition(kind: np.ndarray, color: np.ndarray) -> np.ndarray:
    """Whether each scene's multiset of (kind, colour) belongs to held-out."""
    code = np.sort(np.where(kind >= 0, kind * len(COLORS) + color + 1, 0), axis=1)
    key = (code * np.array([1, 32, 1024])).sum(axis=1).astype(np.uint64)
    # splitmix64's finalizer (Steele, Lea & Flood, 2014). The 2 is a salt with
    # which three of the 24 one-shape compositions are held out, not none.
    mixed = key + np.uint64(2)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed % np.uint64(8) == 0


def draw_scenes(rng: np.random.Generator, batch: int, held_out: bool) -> Scenes:
    """`batch` scenes of one side of the split, shapes apart from each other."""
    tries = 24
    # Attributes: several candidates a scene, the first on the wanted side wins.
    count = rng.choice([1, 2, 3], size=batch, p=[0.2, 0.4, 0.4])
    slots = np.arange(MAX_SHAPES)
    wanted = np.zeros(batch, dtype=bool)
    kind = np.full((batch, MAX_SHAPES), -1)
    color = np.full((batch, MAX_SHAPES), -1)
    while not wanted.all():
        rows = np.flatnonzero(~wanted)
        absent = slots >= count[rows, None]
        kind[rows] = np.where(absent, -1, rng.integers(0, len(KINDS), (len(rows), MAX_SHAPES)))
        color[rows] = np.where(absent, -1, rng.integers(0, len(COLORS), (len(rows), MAX_SHAPES)))
        wanted[rows] = _held_out_composition(kind[rows], color[rows]) == held_out
    # Positions: `tries` candidates a scene, the first without overlap wins;
    # the fallback (none found) is the one with the widest gap.
    radius = rng.uniform(5.0, 8.0, size=(batch, MAX_SHAPES))
    room = CONFIG.image_size - 2.0 * (radius + 1.0)
    center = rng.random((batch, tries, MAX_SHAPES, 2)) * room[:, None, :, None]
    center += (radius + 1.0)[:, None, :, None]
    gap = np.full((batch, tries), np.inf)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        apart = np.linalg.norm(center[:, :, a] - center[:, :, b], axis=-1)
        apart -= 1.15 * (radius[:, a] + radius[:, b])[:, None]
        gap = np.where((count > b)[:, None], np.minimum(gap, apart), gap)
    clear = gap > 1.0
    pick = np.where(clear.any(axis=1), clear.argmax(axis=1), gap.argmax(axis=1))
    return Scenes(kind, color, center[np.arange(batch), pick], radius)


def _distance(scenes: Scenes) -> np.ndarray:
    """Signed distance of each pixel to each shape, ``(batch, 3, 48, 48)``."""
    axis = np.arange(CONFIG.image_size, dtype=np.float32) + 0.5
    x = (axis[None, None, None, :] - scenes.center[:, :, 0, None, None]).astype(np.float32)
    y = (axis[None, None, :, None] - scenes.center[:, :, 1, None, None]).astype(np.float32)
    r = scenes.radius[:, :, None, None].astype(np.float32)
    ax, ay = np.abs(x), np.abs(y)
    circle = np.sqrt(x * x + y * y) - r
    square = np.maximum(ax, ay) - 0.88 * r
    triangle = np.maximum(y - 0.8 * r, 0.884 * ax - 0.467 * (y + r))
    cross = np.minimum(
        np.maximum(ax - 0.32 * r, ay - r),
        np.maximum(ax - r, ay - 0.32 * r),
    )
    kind = scenes.kind[:, :, None, None]
    out = np.select([kind == 0, kind == 1, kind == 2, kind == 3], [circle, square, triangle, cross], np.inf)
    return out.astype(np.float32)


def render(rng: np.random.Generator, scenes: Scenes) -> tuple[np.ndarray, np.ndarray]:
    """Draw `scenes` with anti-aliased edges on noisy, tinted backgrounds.

    Returns
    -------
    image : np.ndarray
        ``(batch, 3, 48, 48)`` float32 in [0, 1].
    cover : np.ndarray
        ``(batch, 3, 48, 48)`` float32, how much of a pixel each shape covers.
    """
    batch, size = len(scenes.kind), CONFIG.image_size
    cover = np.clip(0.5 - _distance(scenes), 0.0, 1.0)
    grey = rng.uniform(0.03, 0.40, (batch, 1, 1, 1))
    tint = rng.uniform(-0.05, 0.05, (batch, 3, 1, 1))
    slope = rng.uniform(-0.08, 0.08, (batch, 2, 1, 1, 1))
    ramp = np.linspace(-1.0, 1.0, size)
    image = grey + tint + slope[:, 0] * ramp[:, None] + slope[:, 1] * ramp
    image = np.clip(image, 0.0, 1.0).astype(np.float32)
    paint = _RGB[scenes.color] + rng.uniform(-0.07, 0.07, (batch, MAX_SHAPES, 3)).astype(np.float32)
    for slot in range(MAX_SHAPES):
        alpha = cover[:, slot, None]
        image = image + alpha * (paint[:, slot, :, None, None] - image)
    image += rng.standard_normal(image.shape, dtype=np.float32) * np.float32(0.03)
    return np.clip(image, 0.0, 1.0), cover


def answer_table(scenes: Scenes) -> np.ndarray:
    """The answer to every question about every scene.

    Returns
    -------
    np.ndarray
        ``(batch, len(QUESTIONS))`` int: an index into `ANSWERS`, or -1 where
        the question is ambiguous for the scene.
    """
    batch = len(scenes.kind)
    kind, color = scenes.kind, scenes.color
    is_kind = kind[:, None, :] == np.arange(len(KINDS))[:, None]  # (batch, 4, 3)
    is_color = color[:, None, :] == np.arange(len(COLORS))[:, None]  # (batch, 6, 3)
    of_kind, of_color = is_kind.sum(axis=2), is_color.sum(axis=2)
    kind_slot, color_slot = is_kind.argmax(axis=2), is_color.argmax(axis=2)
    rows = np.arange(batch)[:, None]
    pair = kind * len(COLORS) + color

    columns = [
        np.where(of_kind == 1, color[rows, kind_slot], -1),
        np.where(of_color == 1, _ANSWER["circle"] + kind[rows, color_slot], -1),
        _ANSWER["zero"] + scenes.present.sum(axis=1, keepdims=True),
        _ANSWER["zero"] + of_kind,
    ]
    has_pair = (pair[:, None, :] == np.arange(len(_PAIRS))[:, None]).any(axis=2)
    columns.append(np.where(has_pair, _ANSWER["yes"], _ANSWER["no"]))

    for axis, sign in ((0, 1), (0, -1), (1, 1), (1, -1)):  # left, right, above, below
        along = scenes.center[:, :, axis]
        # ahead > 0: the other shape lies on the asked side of the anchor.
        ahead = sign * (along[rows, kind_slot][:, :, None] - along[:, None, :])
        other = scenes.present[:, None, :] & (np.arange(MAX_SHAPES) != kind_slot[:, :, None])
        unclear = (other & (np.abs(ahead) < _SIDE_MARGIN)).any(axis=2)
        on_side = other & (ahead > 0)
        found = on_side.sum(axis=2)
        answer = np.where(found == 0, _ANSWER["nothing"], _PAIR0 + pair[rows, on_side.argmax(axis=2)])
        columns.append(np.where((of_kind == 1) & ~unclear & (found <= 1), answer, -1))
    return np.concatenate(columns, axis=1)


def choose_questions(rng: np.random.Generator, answers: np.ndarray, number: int) -> np.ndarray:
    """`number` different answerable questions a scene, families balanced.

    Within a family each answer is equally likely, so that "no", "zero" and
    "nothing" do not win by frequency.

    Returns
    -------
    np.ndarray
        ``(batch, number)`` int, indices into `QUESTIONS`.
    """
    weight = np.zeros(answers.shape)
    # Common, easy or low-entropy families are asked less than the hard ones.
    share = {"color": 1.0, "shape": 1.0, "count": 0.4, "count-kind": 0.8, "any": 1.0, "side": 1.6}
    for index, family in enumerate(FAMILIES):
        block = np.flatnonzero(index == FAMILY)
        part = answers[:, block]
        # same[b, q]: valid questions of the family with the same answer.
        same = (part[:, :, None] == part[:, None, :]).sum(axis=2)
        value = np.where(part >= 0, 1.0 / same, 0.0)
        total = np.maximum(value.sum(axis=1, keepdims=True), 1e-9)
        weight[:, block] = share[family] * value / total
    # Gumbel top-k: sampling without replacement, vectorised.
    with np.errstate(divide="ignore"):
        score = np.log(weight) + rng.gumbel(size=weight.shape)
    return np.argsort(-score, axis=1)[:, :number]


# Two tones a character, as on a telephone keypad: 5 low x 6 high >= 28.
_LOW_HZ = np.array([360.0, 500.0, 640.0, 780.0, 920.0])
_HIGH_HZ = np.array([1250.0, 1550.0, 1920.0, 2380.0, 2950.0, 3650.0])
_FIRST_CHAR = len(vocab.SPECIALS)


def synthesize(rng: np.random.Generator, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Speak each text as one two-tone chord a character.

    Tempo (46-54 ms a character, of which 80-92 % sounds), start, loudness,
    phase and pitch (+-1.5 %) vary; white noise is added.

    Returns
    -------
    audio : np.ndarray
        ``(batch, 20480)`` float32.
    labels : np.ndarray
        ``(batch, 64)`` int64: the character sounding at the centre of each
        audio token, ``<pad>`` in silence (used by the training loss only).
    """
    batch, longest = len(texts), max(map(len, texts))
    ids = np.zeros((batch, longest), dtype=np.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = vocab.encode(text)
    voiced = ids >= _FIRST_CHAR
    code = np.maximum(ids - _FIRST_CHAR, 0)
    shape = (batch, longest)
    low = _LOW_HZ[code // len(_HIGH_HZ)] * rng.uniform(0.985, 1.015, shape)
    high = _HIGH_HZ[code % len(_HIGH_HZ)] * rng.uniform(0.985, 1.015, shape)
    low_gain = np.where(voiced, rng.uniform(0.12, 0.40, shape), 0.0)
    high_gain = np.where(voiced, rng.uniform(0.12, 0.40, shape), 0.0)
    low_phase, high_phase = rng.uniform(0.0, 2.0 * np.pi, (2, *shape))

    rate, samples = CONFIG.sample_rate, CONFIG.audio_samples
    slot = rng.uniform(0.046, 0.054, (batch, 1)) * rate
    start = rng.uniform(0.0, 0.06, (batch, 1)) * rate
    sounding = slot * rng.uniform(0.80, 0.92, (batch, 1))
    when = np.arange(samples)[None, :] - start
    index = np.clip(np.floor(when / slot), 0, longest - 1).astype(np.int64)
    inside = when - index * slot  # samples since the character began

    def at(values: np.ndarray) -> np.ndarray:
        return np.take_along_axis(values, index, axis=1).astype(np.float32)

    edge = 0.003 * rate  # 3 ms fades
    envelope = np.clip(np.minimum(inside, sounding - inside) / edge, 0.0, 1.0).astype(np.float32)
    turn = (inside * (2.0 * np.pi / rate)).astype(np.float32)
    audio = at(low_gain) * np.sin(turn * at(low) + at(low_phase))
    audio += at(high_gain) * np.sin(turn * at(high) + at(high_phase))
    audio *= envelope
    noise = rng.uniform(0.005, 0.03, (batch, 1)).astype(np.float32)
    audio += noise * rng.standard_normal(audio.shape, dtype=np.float32)

    centers = np.arange(CONFIG.audio_tokens) * (2 * CONFIG.hop)
    token = np.take_along_axis(ids, index[:, centers], axis=1)
    labels = np.where(envelope[:, centers] > 0, token, vocab.PAD)
    return audio, labels


def held_out(number: int, seed: int = 0, audio: bool = False) -> list[Sample]:
    """`number` held-out samples, the same for the same arguments.

    Parameters
    ----------
    number : int
        How many; one question a scene.
    seed : int
        Different seeds give different samples, all of them held out.
    audio : bool
        Speak the questions (`Sample.log_mel`) instead of only writing them.
    """
    samples: list[Sample] = []
    # A generator a block: a longer list begins with the shorter one, and the
    # written and the spoken list of one seed ask the same of the same scenes.
    while len(samples) < number:
        rng = np.random.default_rng((0x5EED, seed, len(samples)))
        scenes = draw_scenes(rng, 64, held_out=True)
        images, _ = render(rng, scenes)
        answers = answer_table(scenes)
        asked = choose_questions(rng, answers, 1)[:, 0]
        texts = [QUESTIONS[index] for index in asked]
        mels = log_mel(synthesize(rng, texts)[0]) if audio else None
        for row, (index, text) in enumerate(zip(asked, texts, strict=True)):
            samples.append(
                Sample(
                    image=images[row : row + 1],
                    question=text,
                    answer=ANSWERS[answers[row, index]],
                    family=FAMILIES[FAMILY[index]],
                    log_mel=None if mels is None else mels[row : row + 1],
                )
            )
    return samples[:number]
