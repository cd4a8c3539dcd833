"""MezzoTrainer, or a Session under DistributedDataParallel, in one process on all the data or in two on a half of it each.

``hf_trainer_ranks.py trainer|session``. An overflow comes in one half at the third of six updates.
"""

import os
import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

library = sys.argv[1]
rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
POLICY = "fp16:init_scale=1024:fp32=linear"
torch.manual_seed(0)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))

    def forward(self, inputs, labels, factors):
        losses = F.cross_entropy(self.layers(inputs).float(), labels, reduction="none")
        return {"loss": (losses * factors).mean()}


model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(1)
samples = [
    {
        "inputs": torch.randn(6, generator=data),
        "labels": torch.randint(0, 3, (), generator=data),
        "factors": torch.ones(()),
    }
    for _ in range(96)
]
samples[4 * 8 + 6]["factors"] = torch.tensor(float("inf"))
if library == "trainer":
    import transformers

    from mezzo.compat.transformers import MezzoTrainer

    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=8 // size,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        max_grad_norm=1.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo" if size > 1 else None,
        dataloader_pin_memory=False,
        train_sampling_strategy="sequential",
    )
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = MezzoTrainer(
        model=model, args=arguments, train_dataset=samples, policy=POLICY, optimizers=(optimizer, constant)
    )
    trainer.train()
    skipped = trainer.record().steps.num_skipped
else:
    import mezzo

    trained = model
    if size > 1:
        torch.distributed.init_process_group("gloo")
        trained = nn.parallel.DistributedDataParallel(model)
    session = mezzo.Session(trained, optimizer, policy=POLICY, accumulate=2, clip_norm=1.0)
    for micro in range(12):
        part = samples[8 * micro :][:8] if size == 1 else samples[8 * micro + 4 * rank :][:4]
        with session.autocast():
            loss = trained(**{name: torch.stack([one[name] for one in part]) for name in part[0]})["loss"]
        session.step(loss)
    skipped = session.skipped
total = sum(p.detach().double().abs().sum().item() for p in model.parameters())
print(f"RANK {rank} weights {total!r} skipped {int(skipped)}\n", end="", flush=True)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
