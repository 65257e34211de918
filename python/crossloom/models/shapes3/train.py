"""Train shapes3 from scratch on the CPU and write its fp16 weights.

``python -m crossloom.models.shapes3.train --output shapes3.safetensors``

Three stages under one seed:

1. the vision tower learns which shape covers each patch (dense labels);
2. the audio tower learns which character sounds at each token, scored
   against the tied character embedding, so that speech arrives in the
   decoder in the letters' own space;
3. everything together on answers, the two losses above kept as auxiliaries;
   written questions first, then spoken ones among them.

In stage 3 several questions about one image share its 36 prefix tokens in one
sequence: a question sees the image and itself, and counts its positions from
the image's end, exactly as when it is asked alone.
"""

from __future__ import annotations

import argparse
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from . import data, vocab
from .config import CONFIG
from .features import log_mel
from .muon import Muon
from .network import Shapes3

Item = TypeVar("Item")

IGNORE = -100
_AUDIO_SLOT = -1  # placeholder id of an audio token in a packed row


@dataclass
class Batch:
    """One packed batch of stage 3, as tensors."""

    image: Tensor  # (b, 3, 48, 48)
    patch_kind: Tensor  # (b, 36), 0 = background
    patch_color: Tensor  # (b, 36)
    patch_center: Tensor  # (b, 36, 2) in [0, 1]
    log_mel: Tensor  # (clips, 40, 128)
    frame_label: Tensor  # (clips, 64)
    ids: Tensor  # (b, T) token ids after the image, -1 for audio tokens
    target: Tensor  # (b, T) next-token targets
    position: Tensor  # (b, 36 + T)
    mask: Tensor  # (b, 1, 36 + T, 36 + T) bool


class Heads(nn.Module):
    """Training-only heads on the projected vision features."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = nn.Linear(CONFIG.dim, 1 + len(data.KINDS))
        self.color = nn.Linear(CONFIG.dim, 1 + len(data.COLORS))
        self.center = nn.Linear(CONFIG.dim, 2)


def images(rng: np.random.Generator, batch: int) -> tuple[data.Scenes, list[Tensor]]:
    """Training scenes with image and dense patch labels as tensors."""
    scenes = data.draw_scenes(rng, batch, held_out=False)
    image, cover = data.render(rng, scenes)
    grid, patch = CONFIG.grid, CONFIG.patch_size
    area = cover.reshape(batch, data.MAX_SHAPES, grid, patch, grid, patch).mean(axis=(3, 5))
    area = area.reshape(batch, data.MAX_SHAPES, grid * grid)
    owner, covered = area.argmax(axis=1), area.max(axis=1) > 0.08
    rows = np.arange(batch)[:, None]
    kind = np.where(covered, scenes.kind[rows, owner] + 1, 0)
    color = np.where(covered, scenes.color[rows, owner] + 1, 0)
    center = scenes.center[rows, owner] / CONFIG.image_size
    arrays = [image, kind, color, center.astype(np.float32)]
    return scenes, [torch.from_numpy(array) for array in arrays]


def clips(rng: np.random.Generator, texts: list[str]) -> list[Tensor]:
    """Log-mel features and frame labels of spoken `texts`."""
    audio, labels = data.synthesize(rng, texts)
    return [torch.from_numpy(log_mel(audio)), torch.from_numpy(labels)]


def packed(rng: np.random.Generator, batch: int, texts: int, spoken: int) -> Batch:
    """`batch` images, each with `texts` written and `spoken` spoken questions."""
    scenes, tensors = images(rng, batch)
    answers = data.answer_table(scenes)
    asked = data.choose_questions(rng, answers, texts + spoken)
    prefix = CONFIG.vision_tokens
    said: list[str] = []
    rows: list[list[np.ndarray]] = []
    for row in range(batch):
        parts: list[tuple[np.ndarray, ...]] = []
        for number, question in enumerate(asked[row]):
            if answers[row, question] < 0:
                continue  # fewer answerable questions than asked for
            written = vocab.encode(data.QUESTIONS[question])
            answer = vocab.encode(data.ANSWERS[answers[row, question]])
            if number < spoken:
                said.append(data.QUESTIONS[question])
                head = np.full(CONFIG.audio_tokens, _AUDIO_SLOT)
            else:
                head = written
            part = np.concatenate([head, [vocab.SEP], answer])
            goal = np.full(len(part), IGNORE)
            goal[len(head) :] = np.concatenate([answer, [vocab.EOS]])
            position = prefix + np.arange(len(part))
            parts.append((part, goal, position, np.full(len(part), number + 1)))
        rows.append([np.concatenate(column) for column in zip(*parts)])
    longest = max(len(row[0]) for row in rows)

    def pad(column: int, fill: int) -> np.ndarray:
        out = np.full((batch, longest), fill, dtype=np.int64)
        for index, row in enumerate(rows):
            out[index, : len(row[column])] = row[column]
        return out

    image_part = np.tile(np.arange(prefix), (batch, 1))
    positions = np.concatenate([image_part, pad(2, 0)], axis=1)
    segment = np.concatenate([np.zeros_like(image_part), pad(3, -1)], axis=1)
    total = prefix + longest
    causal = np.tril(np.ones((total, total), dtype=bool))
    same = (segment[:, :, None] == segment[:, None, :]) | (segment[:, None, :] == 0)
    # Without spoken questions a few clips keep the audio tower in step with the
    # embedding it is scored by, which goes on learning.
    mel, label = clips(rng, said or [str(text) for text in rng.choice(data.QUESTIONS, 8)])
    image, kind, color, center = tensors
    return Batch(
        image=image,
        patch_kind=kind,
        patch_color=color,
        patch_center=center,
        log_mel=mel,
        frame_label=label,
        ids=torch.from_numpy(pad(0, vocab.PAD)),
        target=torch.from_numpy(pad(1, IGNORE)),
        position=torch.from_numpy(positions),
        mask=torch.from_numpy(causal & same)[:, None],
    )


def vision_loss(heads: Heads, features: Tensor, kind: Tensor, color: Tensor, center: Tensor) -> Tensor:
    """Kind and colour of the shape on each patch, and where its centre is."""
    flat = features.flatten(0, 1)
    loss = F.cross_entropy(heads.kind(flat), kind.flatten())
    loss = loss + F.cross_entropy(heads.color(flat), color.flatten())
    owned = (kind > 0).unsqueeze(-1)
    error = (heads.center(features) - center).abs() * owned
    return loss + 4.0 * error.sum() / owned.sum().clamp(min=1)


def audio_loss(model: Shapes3, features: Tensor, label: Tensor) -> Tensor:
    """Character sounding at each token, scored by the tied embedding."""
    return F.cross_entropy(model.model.logits(features).flatten(0, 1), label.flatten())


def answer_loss(model: Shapes3, heads: Heads, batch: Batch, vision_weight: float) -> tuple[Tensor, dict[str, float]]:
    """Loss of stage 3 and numbers to print."""
    vision = model.projector(model.vision(batch.image))
    loss_v = vision_loss(heads, vision, batch.patch_kind, batch.patch_color, batch.patch_center)
    embeds = model.model.embed_tokens(batch.ids.clamp(min=0))
    audio = model.audio(batch.log_mel)
    loss_a = audio_loss(model, audio, batch.frame_label)
    slots = batch.ids == _AUDIO_SLOT
    if slots.any():
        embeds = embeds.masked_scatter(slots.unsqueeze(-1).expand_as(embeds), audio)
    inputs = torch.cat((vision, embeds), dim=1)
    hidden, _, _ = model.model(inputs, batch.mask, batch.position)
    wanted = batch.target != IGNORE
    logits = model.model.logits(hidden[:, CONFIG.vision_tokens :][wanted])
    target = batch.target[wanted]
    loss = F.cross_entropy(logits, target)
    # An answer is right where every one of its characters is.
    wrong = torch.zeros(len(target) + 1)
    wrong[1:] = (logits.argmax(-1) != target).float().cumsum(0)
    ends = torch.nonzero(target == vocab.EOS).flatten() + 1
    starts = torch.cat((torch.zeros(1, dtype=torch.long), ends[:-1]))
    right = (wrong[ends] == wrong[starts]).float().mean()
    shown = {"answer": loss.item(), "right": right.item(), "vision": loss_v.item(), "audio": loss_a.item()}
    return loss + vision_weight * loss_v + 0.2 * loss_a, shown


def ahead(make: Callable[[int], Item], steps: int, depth: int = 6) -> Iterator[Item]:
    """Yield ``make(step)`` for each step, computed by a thread in advance.

    Each step has its own seed, so timing does not change the data.
    """
    ready: queue.Queue[Item] = queue.Queue(depth)

    def work() -> None:
        for step in range(steps):
            ready.put(make(step))

    threading.Thread(target=work, daemon=True).start()
    for _ in range(steps):
        yield ready.get()


def optimizers(modules: list[nn.Module], lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices; AdamW for filters, vectors, the embedding and the training-only heads."""
    matrices: list[nn.Parameter] = []
    decayed: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for module in modules:
        for part in module.modules():
            looked_up = isinstance(module, Heads) or isinstance(part, nn.Embedding)
            for parameter in part.parameters(recurse=False):
                if parameter.ndim < 2:
                    vectors.append(parameter)
                elif parameter.ndim > 2 or looked_up:
                    decayed.append(parameter)
                else:
                    matrices.append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return [Muon(matrices, lr), torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))]


def stage(
    name: str,
    steps: int,
    lr: float,
    modules: list[nn.Module],
    make: Callable[[int], Item],
    loss_of: Callable[[Item], tuple[Tensor, dict[str, float]]],
    after: Callable[[int], None] | None = None,
) -> None:
    """Run one stage: warm-up, cosine decay to 2 % of `lr`, clipped gradients."""
    best = optimizers(modules, lr)
    began = time.monotonic()
    mean: dict[str, float] = {}
    for step, batch in enumerate(ahead(make, steps)):
        warm = min(1.0, (step + 1) / min(150.0, 0.1 * steps))
        cosine = 0.02 + 0.98 * 0.5 * (1.0 + math.cos(math.pi * step / steps))
        for group in (group for one in best for group in one.param_groups):
            group["lr"] = lr * warm * cosine
        loss, shown = loss_of(batch)
        for one in best:
            one.zero_grad(set_to_none=True)
        loss.backward()
        for module in modules:
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for one in best:
            one.step()
        for key, value in shown.items():
            mean[key] = value if key not in mean else 0.95 * mean[key] + 0.05 * value
        if (step + 1) % 50 == 0 or step + 1 == steps:
            text = "  ".join(f"{key} {value:.4f}" for key, value in mean.items())
            print(f"{name} {step + 1}/{steps}  {time.monotonic() - began:.0f} s  {text}", flush=True)
        if after is not None:
            after(step)


def save(model: Shapes3, path: Path) -> None:
    """Write every parameter once, rounded to fp16."""
    tensors = {name: p.detach().half().contiguous() for name, p in model.named_parameters()}
    save_file(tensors, path, metadata={"format": "pt"})


def train(args: argparse.Namespace) -> None:
    """All three stages."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    model, heads = Shapes3(CONFIG).train(), Heads()
    if args.resume is not None:
        model.load_state_dict({name: value.float() for name, value in load_file(args.resume).items()})
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)

    def generator(number: int) -> Callable[[int], np.random.Generator]:
        return lambda step: np.random.default_rng((0x7241, args.seed, number, step))

    def see(step: int) -> list[Tensor]:
        return images(generator(1)(step), 64)[1]

    def vision_step(batch: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        image, kind, color, center = batch
        loss = vision_loss(heads, model.projector(model.vision(image)), kind, color, center)
        return loss, {"vision": loss.item()}

    def hear(step: int) -> list[Tensor]:
        rng = generator(2)(step)
        return clips(rng, [str(text) for text in rng.choice(data.QUESTIONS, 32)])

    def audio_step(batch: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        mel, label = batch
        loss = audio_loss(model, model.audio(mel), label)
        return loss, {"audio": loss.item()}

    def ask(step: int) -> Batch:
        # Text alone at first; speech joins once the letters mean something.
        spoken = 0 if step < args.steps * args.text_first else args.spoken
        return packed(generator(3)(step), args.batch, 5 - spoken, spoken)

    def answer_step(batch: Batch) -> tuple[Tensor, dict[str, float]]:
        return answer_loss(model, heads, batch, args.vision_weight)

    def checkpoint(step: int) -> None:
        if (step + 1) % 100 == 0:
            save(model, args.output)

    vision_parts: list[nn.Module] = [model.vision, model.projector, heads]
    stage("vision", args.vision_steps, 2.5e-3, vision_parts, see, vision_step)
    stage("audio", args.audio_steps, 2.5e-3, [model.audio, model.model.embed_tokens], hear, audio_step)
    stage("answer", args.steps, args.lr, [model, heads], ask, answer_step, checkpoint)
    save(model, args.output)
    print(f"wrote {args.output}", flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("shapes3.safetensors"))
    parser.add_argument("--resume", type=Path, help="start from these weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vision-steps", type=int, default=800)
    parser.add_argument("--audio-steps", type=int, default=250)
    parser.add_argument("--steps", type=int, default=2600)
    parser.add_argument("--batch", type=int, default=16, help="images a step in stage 3")
    parser.add_argument("--lr", type=float, default=1.5e-3, help="of stage 3")
    parser.add_argument("--text-first", type=float, default=0.5, help="share of stage 3 without speech")
    parser.add_argument("--spoken", type=int, default=2, help="spoken questions an image, of five")
    parser.add_argument("--vision-weight", type=float, default=0.2, help="of the patch labels in stage 3")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
