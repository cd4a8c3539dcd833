# ruff: noqa: E501, W291
"""Small trainings as people write them, which a snapshot must resume to the bit, with all their files.

Each has the same head. ``tick`` follows each update; a run that is told to dies there.
"""

HEAD = """
import copy, json, math, os, pickle, random, shutil, sys
from pathlib import Path
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, Sampler
torch.manual_seed(0); random.seed(0); np.random.seed(0)
x = torch.randn(40, 4); y = (x.sum(1) > 0).long()
data = TensorDataset(x, y)
loader = DataLoader(data, batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2))
opt = torch.optim.AdamW(model.parameters(), lr=0.01)
_left = [int(os.environ["DIE_AT"])]
def tick():
    _left[0] -= 1
    if _left[0] == 0 and os.environ["DIE_AT"] != "0":
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
def step(a, b, m=None, o=None):
    m = m or model; o = o or opt
    loss = nn.functional.cross_entropy(m(a), b); o.zero_grad(); loss.backward(); o.step(); tick(); return loss.item()
def result(*v):
    weights = [p.double().sum().item() for p in model.parameters()]
    print("\\nresult", v, weights, random.random(), torch.rand(1).item(), np.random.rand())
"""

_BEST = """
def evaluate(m=None):
    m = m or model
    m.eval()
    with torch.no_grad(): v = sum(nn.functional.cross_entropy(m(a), b).item() for a, b in DataLoader(data, 20))
    m.train(); return v
best = float("inf")
os.makedirs("out", exist_ok=True)
for epoch in range(4):
    for g in opt.param_groups: g["lr"] = 0.02 if epoch < 2 else -0.02
    for a, b in loader: step(a, b)
    v = evaluate()
    if v < best:
        best = v
        KEEP
result(best)
"""


def _best(keep: str) -> str:
    return _BEST.replace("KEEP", keep)


SCRIPTS: dict[str, str] = {
    "best np": _best('np.save("out/best.npy", model[0].weight.detach().numpy())'),
    "best json": _best('json.dump({"best": v, "w": model[0].weight.tolist()}, open("out/best.json", "w"))'),
    "best pickle": _best(
        'with open("out/best.pkl", "wb") as f: pickle.dump({k: t.numpy() for k, t in model.state_dict().items()}, f)'
    ),
    "best copy": _best(
        'torch.save(model.state_dict(), f"out/e{epoch}.pt"); shutil.copy(f"out/e{epoch}.pt", "out/best.pt")'
    ),
    "best deepcopy": _best("kept = copy.deepcopy(model.state_dict())"),
    "best safetensors": _best(
        'from safetensors.torch import save_file; save_file(tensors=model.state_dict(), filename="out/best.safetensors")'
    ),
    "best write text": _best(
        'Path("out/best.txt").write_text(str(v)); Path("out/w.bin").write_bytes(model[0].weight.detach().numpy().tobytes())'
    ),
    "best rename": _best(
        'torch.save(model.state_dict(), "out/t.tmp"); os.rename("out/t.tmp", f"out/best-{epoch}.pt"); os.path.exists("out/link") and os.remove("out/link"); os.symlink(f"best-{epoch}.pt", "out/link")'
    ),
    "rotation": r"""
os.makedirs("ck", exist_ok=True); kept = []
for epoch in range(4):
    for a, b in loader: step(a, b)
    torch.save({"m": model.state_dict(), "o": opt.state_dict()}, f"ck/{epoch}.pt"); kept.append(f"ck/{epoch}.pt")
    while len(kept) > 2: os.remove(kept.pop(0))
result(kept)
""",
    "rotation rmtree": r"""
shutil.rmtree("ck", ignore_errors=True); os.makedirs("ck"); kept = []
for epoch in range(4):
    for a, b in loader: step(a, b)
    d = f"ck/checkpoint-{epoch}"; os.mkdir(d); torch.save(model.state_dict(), d + "/m.pt"); Path(d, "state.json").write_text(str(epoch)); kept.append(d)
    if len(kept) > 2: shutil.rmtree(kept.pop(0))
result(kept)
""",
    "log append": r"""
for epoch in range(4):
    for n, (a, b) in enumerate(loader):
        l = step(a, b)
        with open("log.txt", "a") as f: f.write(f"{epoch} {n} {l}\n")
result()
""",
    "log open": r"""
log = open("log.csv", "w"); log.write("epoch,loss\n")
for epoch in range(4):
    for a, b in loader: log.write(f"{epoch},{step(a, b)}\n")
    log.flush()
log.close(); result()
""",
    "log logging": r"""
import logging
logging.basicConfig(filename="train.log", filemode="w", level=logging.INFO, format="%(message)s")
logger = logging.getLogger(__name__)
logger.info("start")
for epoch in range(4):
    for a, b in loader: logger.info("loss %s", step(a, b))
result()
""",
    "log of another name": r"""
import logging
log = open(f"log-{len(os.listdir('.'))}.txt", "w")
logging.basicConfig(filename=f"train-{len(os.listdir('.'))}.log", level=logging.INFO, format="%(message)s")
for epoch in range(4):
    for a, b in loader: l = step(a, b); logging.info("loss %s", l); log.write(f"{l}\n")
log.close(); result()
""",
    "log csv with": r"""
import csv
with open("m.csv", "w", newline="") as f:
    w = csv.writer(f); w.writerow(["loss"])
    for epoch in range(4):
        for a, b in loader: w.writerow([step(a, b)])
result()
""",
    "closure": r"""
def make():
    count = 0; seen = []
    def call(a, b):
        nonlocal count
        count += 1; seen.append(step(a, b)); return count
    return call, lambda: (count, sum(seen))
call, stats = make()
def train():
    total = 0
    def add(v):
        nonlocal total
        total += v
    for epoch in range(4):
        inner = []
        def keep(v): inner.append(v); add(v)
        for a, b in loader:
            keep(call(a, b))
    return total, inner
result(train(), stats())
""",
    "class fit": r"""
class Trainer:
    registry = {}
    steps = 0
    def __init__(self, model):
        self.model = model; self._log = []; self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 40); self.gen = torch.Generator().manual_seed(4)
    def epoch(self, loader):
        for a, b in loader:
            a = a + 0.1 * torch.rand(a.shape, generator=self.gen)
            self._log.append(step(a, b)); Trainer.steps += 1; self.sched.step(); Trainer.registry[Trainer.steps] = self
        return sum(self._log)
    def fit(self, n):
        self.history = []
        for e in range(n): self.history.append(self.epoch(loader))
        return self
def fn(v): fn.calls += 1
fn.calls = 0
t = Trainer(model).fit(4)
result(t._log, t.history, Trainer.steps, len(Trainer.registry), t.sched.get_last_lr())
""",
    "gan": r"""
G = nn.Linear(2, 4); D = nn.Linear(4, 1); og = torch.optim.Adam(G.parameters(), lr=0.01); od = torch.optim.Adam(D.parameters(), lr=0.01)
fixed = torch.randn(3, 2); samples = []
for epoch in range(3):
    for i, (a, _) in enumerate(loader):
        z = torch.randn(4, 2)
        od.zero_grad(); ld = D(G(z).detach()).mean() - D(a).mean(); ld.backward(); od.step()
        if i % 2: 
            og.zero_grad(); lg = -D(G(z)).mean(); lg.backward(); og.step()
        tick()
    samples.append(G(fixed).detach())
result([p.sum().item() for p in [*G.parameters(), *D.parameters()]], [s.sum().item() for s in samples])
""",
    "ema": r"""
ema = copy.deepcopy(model)
for p in ema.parameters(): p.requires_grad_(False)
swa = torch.optim.swa_utils.AveragedModel(model)
for epoch in range(4):
    for a, b in loader:
        step(a, b)
        for e, p in zip(ema.parameters(), model.parameters()): e.mul_(0.9).add_(p.detach(), alpha=0.1)
    swa.update_parameters(model)
result([p.sum().item() for p in ema.parameters()], [p.sum().item() for p in swa.parameters()])
""",
    "curriculum": r"""
class Hard(Dataset):
    def __init__(self): self.level = 1
    def __len__(self): return 10 * self.level
    def __getitem__(self, i): return x[i] * self.level, y[i]
d = Hard()
for stage in range(1, 4):
    d.level = stage
    l = DataLoader(d, 4, shuffle=True)
    for a, b in l: step(a, b)
result(d.level)
""",
    "early stop": r"""
best, bad, epoch = 1e9, 0, 0
while True:
    losses = [step(a, b) for a, b in list(loader)[:3]]
    for a, b in loader: losses.append(step(a, b))
    if sum(losses) < best: best, bad = sum(losses), 0
    else: bad += 1
    epoch += 1
    if bad >= 2 or epoch > 5: break
result(best, bad, epoch)
""",
    "sampler": r"""
class S(Sampler):
    def __init__(self): self.rng = np.random.default_rng(3); self.epoch = 0
    def __iter__(self):
        self.epoch += 1
        return iter(self.rng.permutation(40).tolist())
    def __len__(self): return 40
s = S(); l = DataLoader(data, 4, sampler=s)
for epoch in range(4):
    for a, b in l: step(a, b)
result(s.epoch, s.rng.random())
""",
    "weighted": r"""
l = DataLoader(data, 4, sampler=torch.utils.data.WeightedRandomSampler(torch.rand(40), 40, generator=torch.Generator().manual_seed(2)))
for epoch in range(4):
    for a, b in l: step(a, b)
result()
""",
    "iterable": r"""
class It(IterableDataset):
    def __init__(self): self.seen = 0
    def __iter__(self):
        for i in range(40):
            self.seen += 1
            yield x[i] + torch.randn(4) * 0.1, y[i]
d = It(); l = DataLoader(d, 4)
for epoch in range(4):
    for a, b in l: step(a, b)
result(d.seen)
""",
    "tuple keys": r"""
class Counted(Dataset):
    def __init__(self): self.count = {(i, -i): i for i in range(40)}; self.seen = {}
    def __len__(self): return 40
    def __getitem__(self, i): return x[i] + self.count[(i, -i)] / 40, y[i]
class Both:
    def __init__(self, *loaders): self.n = 0; self.all = [self.forever(one) for one in loaders]
    def __next__(self): self.n += 1; return next(self.all[self.n % 2])
    @staticmethod
    def forever(loader):
        while True:
            for batch in loader: yield batch
d = Counted(); both = Both(DataLoader(d, 4, shuffle=True, num_workers=1), DataLoader(d, 4, shuffle=True))
for n in range(30):
    a, b = next(both); step(a, b); d.count[n, n] = n; d.seen[n, 0] = n
result(len(d.count), len(d.seen))
""",
    "workers": r"""
l = DataLoader(data, 4, shuffle=True, num_workers=2)
for epoch in range(3):
    for a, b in l: step(a, b)
result()
""",
    "own loader": r"""
class L:
    def __init__(self): self.i = 0; self.order = list(range(10))
    def __iter__(self): self.i = 0; random.shuffle(self.order); return self
    def __next__(self):
        if self.i >= 10: raise StopIteration
        k = self.order[self.i]; self.i += 1; return x[k*4:k*4+4], y[k*4:k*4+4]
l = L()
for epoch in range(4):
    for a, b in l: step(a, b)
result(l.i)
""",
    "generator loader": r"""
def batches(n):
    order = np.random.permutation(40)
    for i in range(0, 40, n):
        k = order[i:i+n]
        yield x[k], y[k]
for epoch in range(4):
    for i, (a, b) in enumerate(batches(4)): step(a, b)
result(i)
""",
    "names used twice": r"""
import functools
trained = filter(lambda p: p.requires_grad, model.parameters())
count = sum(p.numel() for p in trained)
def scaled(values, factor):
    def inner(): return [factor[0] * v for v in values]
    inner.values = [7]
    return inner
one = scaled([1, 2], [3])
part = functools.partial(lambda *a, **k: (a, k), [1], func=[2], args=[3])
alike = {"[0x1]": [1], 1: [2], "key 0": [3], (1,): [4]}
for epoch in range(3):
    for a, b in loader:
        step(a, b); one.values.append(epoch); part.keywords["func"].append(epoch); alike[1].append(epoch); alike["[0x1]"].append(a.sum().item())
result(count, one(), one.values, part(), alike, list(trained))
""",
    "infinite generator": r"""
def forever():
    while True:
        for batch in loader:
            yield batch
it = forever()
for i in range(40):
    a, b = next(it); step(a, b)
result(i)
""",
    "next iter": r"""
it = iter(loader); n = 0
while n < 35:
    try: a, b = next(it)
    except StopIteration:
        it = iter(loader); a, b = next(it)
    step(a, b); n += 1
result(n)
""",
    "nested": r"""
def main():
    history = []
    def train_epoch(epoch):
        total = 0.0
        for a, b in loader:
            total += step(a, b)
        return total
    def fit(n):
        for e in range(n): history.append(train_epoch(e))
    fit(4)
    return history
if __name__ == "__main__":
    result(main())
""",
    "kfold": r"""
scores = []
for fold in range(3):
    m = nn.Linear(4, 2); o = torch.optim.Adam(m.parameters(), lr=0.01); sch = torch.optim.lr_scheduler.StepLR(o, 1, 0.5)
    l = DataLoader(data, 4, sampler=torch.utils.data.SubsetRandomSampler([i for i in range(40) if i % 3 != fold]))
    for e in range(2):
        for a, b in l: step(a, b, m, o)
        sch.step()
    scores.append((m.weight.sum().item(), sch.get_last_lr()))
result(scores)
""",
    "two stages": r"""
def pretrain():
    seen = []
    for a, b in loader: seen.append(step(a, b))
    return seen
first = pretrain()
for p in model[0].parameters(): p.requires_grad_(False)
opt2 = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
def finetune(epochs):
    out = []
    for e in range(epochs):
        for a, b in loader: out.append(step(a, b, None, opt2))
    return out
second = finetune(3)
result(first, second)
""",
    "lbfgs": r"""
o = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
model.eval()
for epoch in range(20):
    def closure():
        o.zero_grad(); loss = nn.functional.cross_entropy(model(x), y); loss.backward(); return loss
    loss = o.step(closure); tick()
result(loss.item())
""",
    "scaler": r"""
s = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
for epoch in range(4):
    for a, b in loader:
        with torch.autocast("cpu", torch.bfloat16): loss = nn.functional.cross_entropy(model(a), b)
        opt.zero_grad(); s.scale(loss).backward(); s.step(opt); s.update(); tick()
result(s.get_scale())
""",
    "overflow": r"""
for epoch in range(4):
    for a, b in loader:
        loss = nn.functional.cross_entropy(model(a), b) * 3e4; opt.zero_grad(); loss.backward(); opt.step(); tick()
result()
""",
    "accumulate": r"""
w = torch.randn(4, 2, requires_grad=True); o = torch.optim.SGD([w], lr=0.1)
for epoch in range(4):
    for i, (a, b) in enumerate(loader, 1):
        (nn.functional.cross_entropy(a @ w, b) / 4).backward(); tick()
        if i % 4 == 0: o.step(); o.zero_grad()
result(w.sum().item())
""",
    "replay rl": r"""
import collections
buf = collections.deque(maxlen=20); env = {"s": np.zeros(4)}; total = 0
for ep in range(4):
    s = np.random.randn(4).astype(np.float32)
    for t in range(4):
        a = int(model(torch.tensor(s)).argmax()) if random.random() > 0.3 else random.randrange(2)
        s2 = s + 0.1 * np.random.randn(4).astype(np.float32); r = float(a == int(s.sum() > 0)); buf.append((s, a, r, s2)); s = s2; total += r
        if len(buf) >= 4:
            k = random.sample(buf, 4); step(torch.tensor(np.array([q[0] for q in k])), torch.tensor([q[1] for q in k]))
result(total, len(buf), sum(q[2] for q in buf))
""",
    "rnn carry": r"""
rnn = nn.GRU(4, 8, batch_first=True); head = nn.Linear(8, 2); o = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=0.01)
for epoch in range(3):
    h = torch.zeros(1, 4, 8)
    for a, b in loader:
        h = h.detach()
        if a.shape[0] != 4: continue
        out, h = rnn(a.unsqueeze(1), h); loss = nn.functional.cross_entropy(head(out[:, -1]), b); o.zero_grad(); loss.backward(); o.step(); tick()
result(h.sum().item(), [p.sum().item() for p in rnn.parameters()])
""",
    "zip cycle": r"""
import itertools
other = DataLoader(data, 8, shuffle=True)
for epoch in range(4):
    for n, ((a, b), (c, d)) in enumerate(zip(loader, itertools.cycle([(x[:4], y[:4]), (x[4:8], y[4:8])]))): step(a + c, b)
result(n)
""",
    "zip two loaders": r"""
other = DataLoader(data, 8, shuffle=True)
for epoch in range(4):
    for (a, b), (c, d) in zip(loader, other): step(torch.cat([a, c]), torch.cat([b, d]))
result()
""",
    "tqdm bar": r"""
from tqdm import tqdm
for epoch in range(4):
    bar = tqdm(loader, desc=f"e{epoch}", disable=False)
    for a, b in bar: bar.set_postfix(loss=step(a, b))
result(bar.n)
""",
    "tqdm with": r"""
from tqdm import tqdm, trange
for epoch in trange(4):
    with tqdm(total=len(loader)) as bar:
        for a, b in loader: step(a, b); bar.update()
result(bar.n)
""",
    "try finally": r"""
def main():
    n = 0
    try:
        for epoch in range(4):
            try:
                for a, b in loader: n += 1; step(a, b)
            except KeyboardInterrupt: print("x")
    finally: print("done", n)
    return n
result(main())
""",
    "dataclass ns": r"""
import argparse, dataclasses, types, enum
class Mode(enum.Enum): A = 1; B = 2
@dataclasses.dataclass
class State:
    step: int = 0; mode: Mode = Mode.A; best: float = math.inf; hist: list = dataclasses.field(default_factory=list)
p = argparse.ArgumentParser(); p.add_argument("f"); args = p.parse_args(); args.count = 0; config = vars(args)
st = State(); ns = types.SimpleNamespace(n=0)
for epoch in range(4):
    for a, b in loader:
        st.step += 1; l = step(a, b); st.best = min(st.best, l); st.hist.append(l); args.count += 1; ns.n += 2
        st.mode = Mode.B if st.step % 2 else Mode.A
result(st, args.count, config["count"], ns)
""",
    "hooks metric": r"""
acts = {}
def hook(m, i, o): acts["n"] = acts.get("n", 0) + 1; acts["last"] = o.detach().mean().item()
h = model[0].register_forward_hook(hook)
class Avg:
    def __init__(self): self.reset()
    def reset(self): self.s = 0.0; self.n = 0
    def add(self, v): self.s += v; self.n += 1
avg = Avg(); means = []
for epoch in range(4):
    avg.reset()
    for a, b in loader: avg.add(step(a, b))
    means.append(avg.s / avg.n)
result(acts, means)
""",
    "onecycle": r"""
sch = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=45)
warm = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(model.parameters(), lr=0.1), lambda e: min(1.0, e / 10))
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=1)
for epoch in range(4):
    t = 0.0
    for a, b in loader: t += step(a, b); sch.step()
result(sch.get_last_lr(), opt.param_groups[0]["betas"])
""",
    "train fn args": r"""
def train_one(model, opt, loader, *, epoch, log, scale=1.0, **kw):
    model.train()
    for i, (a, b) in enumerate(loader):
        loss = step(a * scale, b, model, opt); log.append((epoch, i, loss, kw["tag"]))
    return len(log)
def run(cfg):
    log = []
    for epoch in range(cfg["epochs"]):
        n = train_one(model, opt, loader, epoch=epoch, log=log, tag="t")
        print("epoch", epoch, n)
    return log
result(run({"epochs": 4}))
""",
    "noloader while": r"""
i = 0
while i < 40:
    k = torch.randint(0, 40, (4,)); step(x[k], y[k]); i += 1
result(i)
""",
    "globals config": r"""
batch = 4; lr = 0.01
keys = [k for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, str))]
config = {k: globals()[k] for k in keys}
for k in list(globals()): pass
for epoch in range(4):
    for a, b in loader: step(a, b); config["n"] = config.get("n", 0) + 1
result(config, keys)
""",
}
