"""Train MobileNetV3-Large on a folder of pictures.

--data contains train and val, each with a folder of JPEG files for every class, like ImageNet.
Needs timm and Pillow: pip install timm.
"""

import argparse
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

MEAN, DEVIATION = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


class Pictures(Dataset):
    """The JPEG files below a folder with their classes, cropped to a square and resized to ``size`` pixels."""

    def __init__(self, folder: Path, size: int, augment: bool) -> None:
        self.classes = sorted(place.name for place in folder.iterdir() if place.is_dir())
        self.files = [(file, self.classes.index(file.parent.name)) for file in sorted(folder.glob("*/*.[jJ][pP]*"))]
        self.size, self.augment = size, augment

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        file, label = self.files[place]
        with Image.open(file) as picture:
            side = min(picture.size)
            left, top = (picture.width - side) // 2, (picture.height - side) // 2
            square = picture.convert("RGB").resize((self.size, self.size), box=(left, top, left + side, top + side))
        values = torch.from_numpy(np.asarray(square).copy()).permute(2, 0, 1).float() / 255
        values = (values - MEAN.view(3, 1, 1)) / DEVIATION.view(3, 1, 1)
        return (values.flip(2) if self.augment and torch.rand(()) < 0.5 else values), label


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    correct = sum(int((model(x.to(device)).argmax(1).cpu() == y).sum()) for x, y in loader)
    return correct / len(loader.dataset)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="mobilenetv3_large_100", help="any model of timm")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--max-steps", type=int, default=None, help="stop an epoch after so many steps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, test_set = (Pictures(args.data / name, args.size, name == "train") for name in ("train", "val"))
    loader_options = {"batch_size": args.batch_size, "num_workers": args.workers, "pin_memory": device.type == "cuda"}
    train_loader = DataLoader(train_set, shuffle=True, drop_last=True, **loader_options)
    test_loader = DataLoader(test_set, **loader_options)
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format
    model = timm.create_model(args.model, num_classes=len(train_set.classes)).to(device, memory_format=memory_format)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.02)

    for epoch in range(1, args.epochs + 1):
        model.train()
        for step, (images, labels) in enumerate(train_loader):
            if step == args.max_steps:
                break
            output = model(images.to(device, memory_format=memory_format, non_blocking=True))
            loss = F.cross_entropy(output, labels.to(device), label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}  loss {loss.item():.4f}  acc {evaluate(model, test_loader, device):.4f}", flush=True)


if __name__ == "__main__":
    main()
