"""Learn to balance a pole by policy gradients with a value baseline (Williams, 1992), on a cart simulated here."""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GRAVITY, CART, POLE, HALF_LENGTH, FORCE, TICK = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02


def move(state: Tensor, push: Tensor) -> Tensor:
    """Return the states of many carts a tick later; columns: place, speed, angle, angular speed."""
    place, speed, angle, turning = state.unbind(1)
    force = FORCE * (2.0 * push - 1.0)
    pull = (force + POLE * HALF_LENGTH * turning.square() * angle.sin()) / (CART + POLE)
    inertia = HALF_LENGTH * (4 / 3 - POLE * angle.cos().square() / (CART + POLE))
    turn = (GRAVITY * angle.sin() - angle.cos() * pull) / inertia
    slide = pull - POLE * HALF_LENGTH * turn * angle.cos() / (CART + POLE)
    return torch.stack(
        [place + TICK * speed, speed + TICK * slide, angle + TICK * turning, turning + TICK * turn], dim=1
    )


def fallen(state: Tensor) -> Tensor:
    return (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 0.21)


class Agent(nn.Module):
    """A policy (the logit of a push to the right) and the value of a state."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.policy, self.value = nn.Linear(width, 1), nn.Linear(width, 1)

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(state)
        return self.policy(hidden).squeeze(1), self.value(hidden).squeeze(1)


@torch.no_grad()
def play(agent: Agent, carts: int, ticks: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return states, pushes and discounted returns of all ticks before each fall, and the mean length."""
    state, standing = 0.1 * torch.rand(carts, 4, device=device) - 0.05, torch.ones(carts, device=device)
    states, pushes, rewards = [], [], []
    for _ in range(ticks):
        push = torch.bernoulli(torch.sigmoid(agent(state)[0].float()))
        states.append(state)
        pushes.append(push)
        rewards.append(standing)
        state = move(state, push)
        standing = standing * (~fallen(state)).float()
    returns, total = [], torch.zeros(carts, device=device)
    for reward in reversed(rewards):
        total = reward + 0.99 * total
        returns.append(total)
    alive = torch.stack(rewards).flatten() > 0
    length = float(torch.stack(rewards).sum(0).mean())
    stacked = torch.stack(states).flatten(0, 1)[alive], torch.stack(pushes).flatten()[alive]
    return *stacked, torch.stack(returns[::-1]).flatten()[alive], length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--carts", type=int, default=32)
    parser.add_argument("--ticks", type=int, default=200)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    agent = Agent().to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.lr)
    for update in range(1, args.updates + 1):
        states, pushes, returns, length = play(agent, args.carts, args.ticks, device)
        logits, values = agent(states)
        advantage = (returns - values.detach()) / 20
        policy_loss = (F.binary_cross_entropy_with_logits(logits, pushes, reduction="none") * advantage).mean()
        loss = policy_loss + F.smooth_l1_loss(values / 20, returns / 20)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 1.0)
        optimizer.step()
        if update % 10 == 0 or update == args.updates:
            print(f"update {update}  loss {loss.item():.4f}  length {length:.1f}", flush=True)


if __name__ == "__main__":
    main()
