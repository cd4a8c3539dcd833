"""Values of secrets are hidden; values that only look like them stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from forked_processes import in_fork
from mezzo.secrets import hidden, hidden_text, secrets_among

S = "hunter2-Xy7Qp"
KEY = "9f8a7b6c5d4e3f2a1b0c9f8a7b6c5d4e3f2a1b0c"
"""A key of 40 hexadecimal digits, as trackers give them."""

SECRETS: list[tuple[list[str], list[str]]] = [
    (["--api-key", S], ["--api-key", "<API-KEY>"]),
    (["--api_key", S], ["--api_key", "<API-KEY>"]),
    ([f"--api-key={S}"], ["--api-key=<API-KEY>"]),
    ([f"--apikey={S}"], ["--apikey=<APIKEY>"]),
    (["--apiKey", S], ["--apiKey", "<API-KEY>"]),
    (["-api_key", S], ["-api_key", "<API-KEY>"]),
    (["--openai-api-key", S], ["--openai-api-key", "<OPENAI-API-KEY>"]),
    (["--wandb-key", KEY], ["--wandb-key", "<WANDB-KEY>"]),
    (["--comet_key", S], ["--comet_key", "<COMET-KEY>"]),
    (["--key", KEY], ["--key", "<KEY>"]),
    (["--account-key", "Q2hhbmdlTWU0Mg=="], ["--account-key", "<ACCOUNT-KEY>"]),
    (["--access-key", S], ["--access-key", "<ACCESS-KEY>"]),
    (["--aws_access_key_id", S], ["--aws_access_key_id", "<AWS-ACCESS-KEY-ID>"]),
    (["--aws-secret-access-key", S], ["--aws-secret-access-key", "<AWS-SECRET-ACCESS-KEY>"]),
    (["--s3-secret", S], ["--s3-secret", "<S3-SECRET>"]),
    (["--secret", "abc"], ["--secret", "<SECRET>"]),
    (["--client-secret", S], ["--client-secret", "<CLIENT-SECRET>"]),
    (["--private-key", S], ["--private-key", "<PRIVATE-KEY>"]),
    (["--ssh-key", S], ["--ssh-key", "<SSH-KEY>"]),
    (["--encryption_key", S], ["--encryption_key", "<ENCRYPTION-KEY>"]),
    (["--license-key", S], ["--license-key", "<LICENSE-KEY>"]),
    (["--token", S], ["--token", "<TOKEN>"]),
    (["--token", "swordfish"], ["--token", "<TOKEN>"]),
    (["--hf-token", S], ["--hf-token", "<HF-TOKEN>"]),
    (["--hf_token=" + S], ["--hf_token=<HF-TOKEN>"]),
    (["--hub_token", S], ["--hub_token", "<HUB-TOKEN>"]),
    (["--auth-token", S], ["--auth-token", "<AUTH-TOKEN>"]),
    (["--authToken", S], ["--authToken", "<AUTH-TOKEN>"]),
    (["--access_token", S], ["--access_token", "<ACCESS-TOKEN>"]),
    (["--refresh-token", S], ["--refresh-token", "<REFRESH-TOKEN>"]),
    (["--session-token", S], ["--session-token", "<SESSION-TOKEN>"]),
    (["--github-token", S], ["--github-token", "<GITHUB-TOKEN>"]),
    (["--password", "swordfish"], ["--password", "<PASSWORD>"]),
    (["--password=a=b,c d"], ["--password=<PASSWORD>"]),
    (["--password", "$ecret[1]"], ["--password", "<PASSWORD>"]),
    (["--password", "<x>y"], ["--password", "<PASSWORD>"]),
    (["+db.password=a,b}c"], ["+db.password=<PASSWORD>"]),
    (["--config", '{"password": "correct, horse", "lr": 1}'], ["--config", '{"password": "<PASSWORD>", "lr": 1}']),
    (["--config", "{'token': 'a b', 'tokenizer': 'c d'}"], ["--config", "{'token': '<TOKEN>', 'tokenizer': 'c d'}"]),
    (["--db-password", S], ["--db-password", "<DB-PASSWORD>"]),
    (["--dbpassword", S], ["--dbpassword", "<DBPASSWORD>"]),
    (["--passwd", S], ["--passwd", "<PASSWD>"]),
    (["--passphrase", S], ["--passphrase", "<PASSPHRASE>"]),
    (["--pwd", S], ["--pwd", "<PWD>"]),
    (["--mysql-pwd", S], ["--mysql-pwd", "<MYSQL-PWD>"]),
    (["--credential", S], ["--credential", "<CREDENTIAL>"]),
    (["--bearer", S], ["--bearer", "<BEARER>"]),
    (["--jwt", S], ["--jwt", "<JWT>"]),
    (["--pin", "4711"], ["--pin", "<PIN>"]),
    (["--otp", "551234"], ["--otp", "<OTP>"]),
    (["--session-cookie", S], ["--session-cookie", "<SESSION-COOKIE>"]),
    (["--connection-string", S], ["--connection-string", "<CONNECTION-STRING>"]),
    ([f"wandb.api_key={S}"], ["wandb.api_key=<API-KEY>"]),
    ([f"+logger.token={S}"], ["+logger.token=<TOKEN>"]),
    ([f"++trainer.hub_token={S}"], ["++trainer.hub_token=<HUB-TOKEN>"]),
    ([f"api_key={S}"], ["api_key=<API-KEY>"]),
    (["--config", f'{{"api_key": "{S}", "lr": 0.1}}'], ["--config", '{"api_key": "<API-KEY>", "lr": 0.1}']),
    (["--config", f"{{api_key: {S}, lr: 0.1}}"], ["--config", "{api_key: <API-KEY>, lr: 0.1}"]),
    (["-H", f"Authorization: Bearer {S}"], ["-H", "Authorization: Bearer <SECRET>"]),
    (["--header", f"X-Api-Key: {S}"], ["--header", "X-Api-Key: <X-API-KEY>"]),
    (["--db", f"postgres://me:{S}@db.example.org/x"], ["--db", "postgres://me:<PASSWORD>@db.example.org/x"]),
    (["--proxy", f"me:{S}@proxy.example.org:80"], ["--proxy", "me:<PASSWORD>@proxy.example.org:80"]),
    (["--redis", f"redis://:{S}@localhost:6379/0"], ["--redis", "redis://:<PASSWORD>@localhost:6379/0"]),
    (["--repo", f"https://ghp{S}AAAA11@github.com/a/b"], ["--repo", "https://<SECRET>@github.com/a/b"]),
    ([f"https://x.org/f?a=1&token={S}&b=2"], ["https://x.org/f?a=1&token=<TOKEN>&b=2"]),
    (["--url", f"https://me:{S}@x.org/?token=abc"], ["--url", "https://me:<PASSWORD>@x.org/?token=<TOKEN>"]),
    ([f"https://x.org/f?sig={KEY}"], ["https://x.org/f?sig=<SIG>"]),
    ([f"s3://b/f?X-Amz-Signature={KEY}"], ["s3://b/f?X-Amz-Signature=<X-AMZ-SIGNATURE>"]),
    (["hf_AbCdEfGhIjKlMnOpQr"], ["<SECRET>"]),
    (["sk-proj-AbCd1234EfGh5678"], ["<SECRET>"]),
    (["--login", "AKIAIOSFODNN7EXAMPLE"], ["--login", "<SECRET>"]),
    (["--id", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-def"], ["--id", "<SECRET>"]),
    (["glpat-AbCd1234EfGh5678"], ["<SECRET>"]),
]
VARIABLES = (
    "HF_TOKEN", "MY_PWD", "DBPWD", "HFACCESSKEY", "TORCHAUTHTOKEN", "HF_BEARER", "MYBEARER", "HF_PIN", "USERPIN", "TORCH_PASSWORD",
    "WANDB_API_KEY", "CLIENTSECRET", "AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_CONNECTION_STRING",
)  # fmt: skip
HARMLESS = """
--max-tokens 512 | --max_new_tokens=256 | --tokenizer bpe | --tokenizer=hf-internal/llama_tokenizer | --token-dropout 0.1 | --num-keys 8
--key-dim 64 | --key loss | --sort-key length | --image-key jpg | --text_key=caption | --label-key label_id | --metric-key acc1
--password $DB_PASSWORD | --token=${HF_TOKEN}
--pad-token <pad> | --eos-token </s> | --mask_token [MASK] | --bos_token_id 1 | --user-token user | --stop-tokens .,; | --tokens 100000
--passes 3 | --pass-through layer2 | --pin-memory true | --pin_memory=1 | --spin 0.5 | --author me | --compass north | --bypass 4
--keypoints 17 | --monkey see | --keyword-file words.txt | --pattern *.pt | --patience 5 | --patch-size 16 | --path data/train
--password-file pw.txt | --credentials creds/key.json | --api-key-env WANDB_API_KEY | --revision 3adf61e154c3fe3fca428ad6bc3818b27a3b8291
--model timm:resnet50.a1_in1k | --data https://example.org/data.tar?download=1 | --lr=0.1 | --betas 0.9,0.999 | --session 3
--log-to mlflow:http://localhost:5000 | --use-auth-token true | --token 512 | data.tokenizer=gpt2 | model.key_dim=64 | optimizer=adamw
--model hf-internal-testing/tiny-v2 | --model sk-learn-model-v2 | --index pypi-mirror-2.13.0 | --to mailto:me@example.org
--image trainer:latest@sha256:0a1b2c3d4e5f | --repo git@github.com:a/b.git
--ckpt runs/2026-11-29T10:20:30/model.pt | s3://bucket/key/part-0001.parquet | --auth basic | --device cuda:0 | --dsn sqlite:///runs.db
""".replace("\n", " | ")


@pytest.mark.parametrize(("words", "shown"), SECRETS, ids=lambda words: " ".join(words)[:40])
def test_secrets_among_words(words: list[str], shown: list[str]) -> None:
    assert hidden(words) == tuple(shown)
    hidden_ones = secrets_among(words, {})
    assert hidden_ones
    assert all(value in " ".join(words) and value not in " ".join(shown) for value in hidden_ones.values())


@pytest.mark.parametrize("line", [one.strip() for one in HARMLESS.split("|") if one.strip()])
def test_harmless_words_stay(line: str) -> None:
    words = line.split(" ")

    assert hidden(words) == tuple(words)


@pytest.mark.parametrize("name", VARIABLES)
def test_secrets_among_variables(name: str) -> None:
    assert secrets_among([], {name: S, "PWD": "/home/me", "OLDPWD": "/", "HOME": "/root"}) == {f"${name}": S}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f'api_key = "{S}"', 'api_key = "<API-KEY>"'),
        ("token = tokens[i]; key = query @ x", None),
        ("password = getpass.getpass()", None),
        (f"401 for url: https://x.org/f?token={S}", "401 for url: https://x.org/f?token=<TOKEN>"),
        (f"cannot log in with {S}", "cannot log in with <SECRET>"),
        ("loss: 0.5, key: value", None),
        ("Basic statistics: Token classification of Bearer", None),
        ("File \"train.py\", line 3: x = y['token']", None),
    ],
)
def test_texts(text: str, shown: str | None) -> None:
    assert hidden_text(text, values=[S, "layer", "12"]) == (text if shown is None else shown)


# --- commands --------------------------------------------------------------------------------

SCRIPT = """
import argparse, os, torch
parser = argparse.ArgumentParser()
parser.add_argument("--api-key"); parser.add_argument("--steps", type=int)
args, rest = parser.parse_known_args()
hub, auth = os.environ["HF_TOKEN"], f"Bearer {args.api_key}"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
opt = torch.optim.AdamW(model.parameters(), 0.01)
for step in range(args.steps):
    x = torch.randn(16, 8)
    loss = torch.nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
    opt.zero_grad(); loss.backward(); opt.step()
if "--fail" in rest:
    raise SystemExit(f"401 for https://me:{args.api_key}@x.org/?token={args.api_key}: {hub}")
"""
COMMANDS = {
    "run": ["--policy", "fp16"],
    "run with snapshots": ["--policy", "fp16", "--snapshot", "0.01s"],
    "run that fails": ["--policy", "fp16"],
    "watch": [],
    "compare": ["--policies", "fp32,fp16"],
    "audit": ["--policy", "fp16"],
    "diagnose": ["--policy", "fp16"],
    "ranges": [],
    "fallback": ["--policy", "fp16"],
    "check": ["--seeds", "1"],
    "tune": ["--budget", "20s"],
    "resume-check": [],
    "predict": ["--gpus", "h100"],
    "predict without its option": ["--gpu", "h100"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_no_secret_is_printed_or_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [word for words, _ in SECRETS for word in words]
    variables = dict.fromkeys(VARIABLES, S) | {"HF_TOKEN": "hf_QwErTyUiOp123456"}
    secrets = {one for one in secrets_among(words, variables).values() if len(one) > 6}
    assert len(secrets) > 8
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    (tmp_path / "train.py").write_text(SCRIPT)
    own = ["train.py", "--steps", "6", *(["--fail"] if "fails" in name else []), *words]
    tracker = ["--log-to", f"tensorboard:{tmp_path / 'tracker'}"]

    ended = in_fork([name.split()[0], *COMMANDS[name], "--out", "out", *tracker, *own], folder=tmp_path)

    assert ended.code in ((2,) if "without" in name else (0, 1)), ended.printed
    printed = ended.printed.replace(f"401 for https://me:{S}@x.org/?token={S}: hf_QwErTyUiOp123456", "")
    assert [one for one in secrets if one in printed] == []
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "train.py"]
    assert [(str(path), one) for path in files for one in secrets if one.encode() in path.read_bytes()] == []
