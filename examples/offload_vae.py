#!/usr/bin/env python3
"""Trains on the latents of a VAE that is offloaded to the host, twice: plainly, and without waiting for the GPU.

The latents are scaled by the running statistics of a batch norm that belongs to the VAE. The VAE is moved to the host
between uses to leave the memory to the model that is trained. The plain loop uploads the statistics in each step, and
reads its loss in each step. The other one leaves the two small buffers on the device (`pin_buffers`), keeps what is
derived from them (`ResidentCache`), and reads the loss once it has arrived (`AsyncScalars`), in order and to the last
step; NaN is found late, but attributed to its step and before anything is saved (`NonFiniteGuard`). Losses and weights
of both loops are equal in each bit.

    python examples/offload_vae.py --help
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sync_count import counted_syncs, per_step
from torch import Tensor, nn

import syncfree_ext as sf

# Steps left out of the count: allocator growth, library handles.
WARM_UP = 3


class Vae(nn.Module):
    """As much of an autoencoder as matters here: an encoder, and a batch norm whose statistics scale the latents."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Conv2d(3, channels, 4, stride=4)
        self.bn = nn.BatchNorm2d(channels, affine=False)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Latents; the statistics are brought up to date on the way, as while it was trained."""
        latents: Tensor = self.encoder(images)
        self.bn(latents)
        return latents


class Denoiser(nn.Module):
    """Predicts the noise in scaled latents."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1), nn.SiLU(), nn.Conv2d(32, channels, 3, padding=1)
        )

    def forward(self, noisy: Tensor) -> Tensor:
        """Of the same shape."""
        noise: Tensor = self.net(noisy)
        return noise


class Setup:
    """VAE, cached latents and model; the same for both loops."""

    def __init__(self, device: torch.device, steps: int) -> None:
        torch.manual_seed(0)
        self.device, self.steps = device, steps
        self.vae = Vae().to(device)
        images = torch.randn(64, 3, 32, 32).to(device)
        self.latents = torch.cat([self.vae.encode(images) for _ in range(4)])
        self.model = Denoiser().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, fused=True)
        self.generator = torch.Generator(device).manual_seed(3)

    def batch(self) -> Tensor:
        """Latents of a step, drawn on the device."""
        rows = torch.randint(len(self.latents), (16,), generator=self.generator, device=self.device)
        return self.latents[rows]

    def update(self, scaled: Tensor) -> tuple[Tensor, Tensor]:
        """One step of the optimizer; the loss and the gradient norm."""
        noise = torch.empty_like(scaled).normal_(generator=self.generator)
        loss = F.mse_loss(self.model(0.6 * scaled + 0.8 * noise), noise)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), norm


def offload(vae: Vae) -> None:
    """Away with everything that is not pinned."""
    vae.cpu()


def plain(device: torch.device, steps: int) -> tuple[Setup, list[float], str]:
    """Statistics go up and the loss comes down in each step."""
    setup, losses = Setup(device, steps), []

    def step() -> None:
        latents = setup.batch()
        bn = setup.vae.bn
        assert bn.running_mean is not None
        assert bn.running_var is not None
        mean = bn.running_mean.to(latents.device, latents.dtype).view(1, -1, 1, 1)
        std = (bn.running_var + bn.eps).sqrt().to(latents.device, latents.dtype).view(1, -1, 1, 1)
        loss, _ = setup.update((latents - mean) / std)
        value = loss.item()
        if not torch.isfinite(loss):
            raise RuntimeError("the loss is not finite")
        losses.append(value)

    offload(setup.vae)
    for _ in range(WARM_UP):
        step()
    with counted_syncs(device) as syncs:
        for _ in range(steps - WARM_UP):
            step()
    return setup, losses, per_step(syncs, steps - WARM_UP, device)


def sync_free(device: torch.device, steps: int) -> tuple[Setup, list[float], str]:
    """Statistics stay where they are read, the loss comes when it comes."""
    setup, losses = Setup(device, steps), [0.0] * steps
    standard_deviation = sf.ResidentCache(lambda variance, eps: (variance + eps).sqrt(), device)
    ring = sf.AsyncScalars(device, ["loss"], depth=2)
    guard = sf.NonFiniteGuard(ring)

    def receive() -> None:
        for index, values in ring.poll():
            losses[index] = values["loss"]

    def step(index: int) -> None:
        latents = setup.batch()
        bn = setup.vae.bn
        assert bn.running_mean is not None
        assert bn.running_var is not None
        std = standard_deviation(bn.running_var, bn.eps, dtype=latents.dtype)
        scaled = (latents - bn.running_mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)
        loss, norm = setup.update(scaled)
        guard.update(index, loss, norm)
        ring.put(index, {"loss": loss})
        receive()

    # Leaving the ring waits for the last values; leaving the pin lets the VAE go where it is sent again.
    with sf.pin_buffers(setup.vae.bn, ["running_mean", "running_var"], device), ring:
        offload(setup.vae)
        for index in range(WARM_UP):
            step(index)
        with counted_syncs(device) as syncs:
            for index in range(WARM_UP, steps):
                step(index)
        guard.check()  # before a checkpoint is written
    receive()
    return setup, losses, per_step(syncs, steps - WARM_UP, device)


def main() -> None:
    """Trains both ways and compares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="training steps of each run (default: 200)")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps: expected more than {WARM_UP}, got {options.steps}")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.backends.cudnn.deterministic = True
    before, plain_losses, plain_syncs = plain(device, options.steps)
    after, free_losses, free_syncs = sync_free(device, options.steps)

    shown = sorted({0, options.steps // 4, options.steps // 2, options.steps - 1})
    print("loss of step " + ", ".join(f"{index}: {free_losses[index]:.4f}" for index in shown))
    print(f"syncs per step: {plain_syncs} before, {free_syncs} after")
    weights = zip(before.model.parameters(), after.model.parameters(), strict=True)
    if plain_losses != free_losses or not all(torch.equal(a, b) for a, b in weights):
        raise SystemExit("the two runs differ")
    print(f"all {options.steps} losses and the weights are equal in each bit")


if __name__ == "__main__":
    main()
