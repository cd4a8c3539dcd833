"""Train a tiny GAN on handwritten digits in FP16: two models, two optimizers, two losses, one session.

``python examples/session_gan.py``
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import mezzo

NOISE = 32
BATCH = 64
STEPS = 150


def main() -> None:
    """Train critic and generator alternately and print their losses."""
    torch.manual_seed(0)
    images = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh())
    critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
    make = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    judge = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    session = mezzo.Session([generator, critic], [make, judge], policy="fp16")

    for step in range(1, STEPS + 1):
        real = images[torch.randint(len(images), (BATCH,))]

        # The critic's turn: it learns to tell real images from generated ones. detach() keeps its loss out of the generator.
        with session.autocast():
            made = generator(torch.randn(BATCH, NOISE))
            scores_real, scores_made = critic(real), critic(made.detach())
            critic_loss = F.softplus(-scores_real).mean() + F.softplus(scores_made).mean()
        session.backward(critic_loss)
        session.update(judge)

        # The generator's turn: its loss also has gradients in the critic; update(make) drops them.
        with session.autocast():
            generator_loss = F.softplus(-critic(generator(torch.randn(BATCH, NOISE)))).mean()
        session.backward(generator_loss)
        session.update(make)

        if step % 50 == 0:
            print(
                f"step {step}  critic {critic_loss.item():.3f}  generator {generator_loss.item():.3f}  "
                f"scale {session.loss_scale:g}  skipped {session.skipped}"
            )


if __name__ == "__main__":
    main()
