"""Train a generative adversarial network on MNIST (DCGAN, Radford et al., arXiv:1511.06434): two models, two optimizers, two losses."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from mnist_cnn import read_idx

NOISE = 64


def build_generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 64, 7, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, 2, 1),
        nn.Tanh(),
    )


def build_discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, 2, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="MNIST's files")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = read_idx(args.data, "train-images-idx3-ubyte").unsqueeze(1).float() / 127.5 - 1
    loader = DataLoader(images, args.batch_size, shuffle=True, drop_last=True)
    generator, discriminator = build_generator().to(device), build_discriminator().to(device)
    optimizers = [torch.optim.Adam(m.parameters(), lr=args.lr, betas=(0.5, 0.999)) for m in (generator, discriminator)]
    step = 0
    while step < args.steps:
        for real in loader:
            fake = generator(torch.randn(len(real), NOISE, 1, 1, device=device))
            scores_real, scores_fake = discriminator(real.to(device)), discriminator(fake.detach())
            loss_real = F.binary_cross_entropy_with_logits(scores_real, torch.ones_like(scores_real))
            loss_fake = F.binary_cross_entropy_with_logits(scores_fake, torch.zeros_like(scores_fake))
            discriminator_loss = loss_real + loss_fake
            optimizers[1].zero_grad()
            discriminator_loss.backward()
            optimizers[1].step()

            scores = discriminator(fake)
            generator_loss = F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
            optimizers[0].zero_grad()
            generator_loss.backward()
            optimizers[0].step()
            step += 1
            if step % 20 == 0 or step == args.steps:
                losses = f"generator {generator_loss.item():.4f}  discriminator {discriminator_loss.item():.4f}"
                print(f"step {step}  {losses}", flush=True)
            if step == args.steps:
                break


if __name__ == "__main__":
    main()
